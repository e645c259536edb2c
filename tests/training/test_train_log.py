import struct

from engine.training.event_file import EventFile, crc32c
from engine.training.train_log import LOG, TrainingLog, read_log


def entry(step, loss=1.5):
    return {"step": step, "loss": loss, "acceptance": [0.5, 0.25]}


def test_entries_after_the_resumed_step_are_dropped(tmp_path):
    with TrainingLog(tmp_path, 0, 9) as log:
        for step in (2, 4, 6):
            log.write(entry(step))
    with (tmp_path / LOG).open("a") as file:
        file.write('{"step": 7, "lo')
    with TrainingLog(tmp_path, 4, 9) as log:
        log.write(entry(6, loss=1.0))
    assert read_log(tmp_path) == [entry(2), entry(4), entry(6, loss=1.0)]


def test_a_process_that_is_not_the_first_writes_nothing(tmp_path):
    with TrainingLog(None, 0, 9) as log:
        log.write(entry(1))
        log.advance()
    assert read_log(tmp_path) == []


def test_crc_is_that_of_castagnoli():
    # The check values of RFC 3720, appendix B.4.
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA


def test_events_are_framed_records_of_step_and_scalars(tmp_path):
    file = EventFile(tmp_path)
    file.write(300, {"loss": 0.5})
    file.close()
    (path,) = tmp_path.iterdir()
    records = list(read_records(path.read_bytes()))
    assert records[0].endswith(b"brain.Event:2")
    value = b"\x0a\x04loss\x15" + struct.pack("<f", 0.5)
    summary = b"\x0a" + bytes([len(value)]) + value
    assert records[1][9:] == b"\x10\xac\x02" + b"\x2a" + bytes([len(summary)]) + summary


def read_records(data):
    """Yield the records of a TFRecord file whose checksums hold."""
    place = 0
    while place < len(data):
        length = data[place : place + 8]
        (size,) = struct.unpack("<Q", length)
        assert data[place + 8 : place + 12] == masked(length)
        record = data[place + 12 : place + 12 + size]
        assert data[place + 12 + size : place + 16 + size] == masked(record)
        yield record
        place += 16 + size


def masked(data):
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)
