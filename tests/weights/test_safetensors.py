"""The safetensors reader and writer against the format and its own library."""

import json

import pytest
import torch

from engine.errors import ModelLoadError
from engine.weights.safetensors import SafetensorsFile, write_safetensors

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def sample_tensors():
    generator = torch.Generator().manual_seed(3)
    tensors = {str(dtype): torch.randn(3, 5, generator=generator).to(dtype) for dtype in FLOATS}
    tensors |= {
        str(dtype): torch.randint(0, 2, (5, 1, 3), generator=generator).to(dtype) for dtype in INTEGERS
    }
    return tensors | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "größe": torch.ones(1)}


def encode(header, data=b""):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def assert_same(tensor, expected):
    assert tensor.dtype == expected.dtype
    assert tensor.shape == expected.shape
    assert torch.equal(tensor.contiguous().view(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def test_every_dtype_survives_a_round_trip(tmp_path):
    tensors = sample_tensors()
    write_safetensors(tmp_path / "a.safetensors", tensors, {"format": "pt", "note": "ü"})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert file.metadata == {"format": "pt", "note": "ü"}
    assert file.names() == tensors.keys()
    for name, expected in tensors.items():
        assert file.shape(name) == tuple(expected.shape)
        assert_same(file.read(name), expected)


def test_files_agree_with_the_formats_own_library(tmp_path):
    official = pytest.importorskip("safetensors.torch")
    tensors = sample_tensors()
    write_safetensors(tmp_path / "ours.safetensors", tensors)
    official.save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    theirs = SafetensorsFile(tmp_path / "theirs.safetensors")
    ours = official.load_file(tmp_path / "ours.safetensors")
    assert ours.keys() == theirs.names() == tensors.keys()
    for name, expected in tensors.items():
        assert_same(ours[name], expected)
        assert_same(theirs.read(name), expected)


def test_strided_tensors_are_written_in_order(tmp_path):
    matrix = torch.arange(12.0).view(3, 4)
    write_safetensors(tmp_path / "a.safetensors", {"t": matrix.T, "half": matrix[:, ::2]})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert torch.equal(file.read("t"), matrix.T)
    assert torch.equal(file.read("half"), matrix[:, ::2])


def test_bytes_depend_on_content_only(tmp_path):
    tensors = sample_tensors()
    write_safetensors(tmp_path / "a.safetensors", tensors, {"x": "1", "y": "2"})
    write_safetensors(tmp_path / "b.safetensors", dict(reversed(tensors.items())), {"y": "2", "x": "1"})
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_unaligned_data_is_read(tmp_path):
    path = tmp_path / "a.safetensors"
    value = torch.tensor([1.5, -2.0])
    header = json.dumps({"f": entry("F32", (2,), (0, 8))}).encode()
    header += b" " * ((3 - len(header)) % 8)
    path.write_bytes(encode(header, bytes(value.view(torch.uint8).tolist())))
    assert torch.equal(SafetensorsFile(path).read("f"), value)


def test_writing_to_a_read_tensor_leaves_the_file_alone(tmp_path):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"x": torch.ones(4)})
    before = path.read_bytes()
    SafetensorsFile(path).read("x").zero_()
    assert path.read_bytes() == before
    assert torch.equal(SafetensorsFile(path).read("x"), torch.ones(4))


def test_a_replaced_file_does_not_change_tensors_read_before(tmp_path):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"x": torch.ones(4)})
    tensor = SafetensorsFile(path).read("x")
    write_safetensors(path, {"x": torch.zeros(4)})
    assert torch.equal(tensor, torch.ones(4))


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"x": torch.ones(4)})

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_safetensors(path, {"x": torch.zeros(4)})
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]
    assert torch.equal(SafetensorsFile(path).read("x"), torch.ones(4))


def test_every_truncation_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"x": torch.ones(4), "y": torch.ones(2, dtype=torch.float16)})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"a\.safetensors"):
            SafetensorsFile(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ModelLoadError, match="bytes of data"):
        SafetensorsFile(path)


def test_no_corrupt_header_byte_causes_another_error(tmp_path):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"x": torch.ones(4), "y": torch.ones(2, dtype=torch.float16)}, {"format": "pt"})
    whole = path.read_bytes()
    num_refused = 0
    for position in range(8 + int.from_bytes(whole[:8], "little")):
        for mask in (0x01, 0x10, 0x80):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ mask]) + whole[position + 1 :])
            try:
                file = SafetensorsFile(path)
            except ModelLoadError:
                num_refused += 1
            else:  # a byte of a name: another name, but whole tensors
                assert sorted(file.shape(name) for name in file.names()) == [(2,), (4,)]
    assert num_refused > 300


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (encode(b"[]"), "JSON object"),
        (encode(b"\xff\xfe"), "corrupt header"),
        (encode(b"[" * 50_000), "corrupt header"),
        (encode(b'{"a":{},"a":{}}'), "twice"),
        (encode({"a": []}, bytes(4)), "corrupt entry"),
        (encode({"a": {"dtype": "U8", "shape": [4]}}, bytes(4)), "corrupt entry"),
        (encode({"a": entry(offsets=(0, 4, 8))}, bytes(4)), "corrupt entry"),
        (encode({"a": entry(offsets=(0, "4"))}, bytes(4)), "corrupt entry"),
        (encode({"a": entry(shape=(-4,))}, bytes(4)), "corrupt shape"),
        (encode({"a": entry(shape=(4.0,))}, bytes(4)), "corrupt shape"),
        (encode({"a": entry(dtype="U9")}, bytes(4)), "U9"),
        (encode({"a": entry(shape=(5,))}, bytes(4)), "cannot take 4 bytes"),
        (encode({"a": entry(offsets=(4, 0))}, bytes(4)), "cannot take"),
        (encode({"a": entry(), "b": entry(offsets=(2, 6))}, bytes(6)), "overlap"),
        (encode({"a": entry(), "b": entry(offsets=(5, 9))}, bytes(9)), "gaps"),
        (encode({"a": entry(offsets=(-4, 0))}), "overlap"),
        (encode({"a": entry()}, bytes(3)), "truncated"),
        (encode({"__metadata__": {"epoch": 3}}), "metadata"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "header"),
        (b"version https://git-lfs.github.com/spec/v1\n", "header"),
    ],
)
def test_corrupt_files_are_refused(tmp_path, content, complaint):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=complaint) as caught:
        SafetensorsFile(path)
    assert "bad.safetensors" in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"gone\.safetensors"):
        SafetensorsFile(tmp_path / "gone.safetensors")
