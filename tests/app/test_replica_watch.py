"""Each change of the number of running replicas is told once, in words."""

from app.replica_watch import ReplicaWatch, ScaledReplicaWatch


def test_each_change_is_told_once() -> None:
    watch = ReplicaWatch(2, "/logs")
    lines = [watch.observe(num_running) for num_running in (2, 1, 1, 0, 0, 2, 2)]
    assert [line is None for line in lines] == [True, False, True, False, True, False, True]
    failed, both, back = (line for line in lines if line)
    assert failed == "1 of 2 server replicas failed and will be replaced; the reason is in /logs"
    assert both.startswith("1 of 2 server replicas failed")
    assert back == "2 of 2 server replicas serve again"


def test_where_replicas_are_scaled_a_change_is_no_failure() -> None:
    watch = ScaledReplicaWatch(1)
    assert [watch.observe(num_running) for num_running in (1, 3, 3, 2)] == [
        None,
        "3 server replicas run, 1 before",
        None,
        "2 server replicas run, 3 before",
    ]
