"""Conversion of a tiny GGUF file: weights, config and tokenizer of the Hugging Face folder."""

import json

import pytest
import torch

from engine.errors import ModelLoadError
from engine.model.config import ModelConfig
from engine.weights.convert_gguf import convert_gguf, hugging_face_name, undo_rotary_permutation
from engine.weights.safetensors import SafetensorsFile

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")


def ignore_progress(num_done, num_all):
    pass


@pytest.fixture
def convert(tmp_path, write_gguf):
    def convert_tiny(weights, **fields):
        write_gguf(tmp_path / "tiny.gguf", weights, **fields)
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        convert_gguf(tmp_path / "tiny.gguf", folder, ignore_progress)
        return folder

    return convert_tiny


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_come_back_under_their_names_and_in_their_row_order(convert, tiny_llama_weights, is_tied):
    weights = tiny_llama_weights(is_tied)
    folder = convert(weights)
    file = SafetensorsFile(folder / "model.safetensors")
    assert file.names() == weights.keys()
    for name, weight in weights.items():
        assert file.read(name).dtype is torch.bfloat16
        assert torch.equal(file.read(name).float(), weight), name
    assert ModelConfig.load(folder).tie_word_embeddings is is_tied


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_quantized_tensors_are_dequantized(convert, tiny_llama_weights, kind):
    quantization = gguf.GGMLQuantizationType[kind]
    weights = tiny_llama_weights()
    folder = convert(weights, embedding_type=quantization)
    name = "model.embed_tokens.weight"
    converted = SafetensorsFile(folder / "model.safetensors").read(name)
    original = weights[name].numpy()
    expected = gguf.dequantize(gguf.quantize(original, quantization), quantization)
    assert torch.equal(converted, torch.from_numpy(expected).bfloat16())
    step = {"Q8_0": 1 / 127, "Q4_1": 2 / 15}[kind]  # of a block's largest value
    assert (converted.float() - weights[name]).abs().max() <= step * weights[name].abs().max()


def test_config_is_read_from_the_metadata(convert, tiny_llama_weights):
    assert ModelConfig.load(convert(tiny_llama_weights())) == ModelConfig(
        vocab_size=263,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        rope_scaling=None,
        max_position=128,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=1,
        eos_token_ids=(2,),
        dtype="bfloat16",
    )


def rotate(pairs, position):
    """Turn pairs (x, y) [..., half, 2] by the rotary angles of `position`."""
    half = pairs.shape[-2]
    angle = position * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    x, y = pairs.unbind(-1)
    return torch.stack([x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()], dim=-1)


def test_rotate_half_on_unpermuted_rows_equals_neighbour_pairs_on_gguf_rows():
    """The attention score is the same: GGUF rows with neighbour pairs, converted rows with rotate-half."""
    generator = torch.Generator().manual_seed(1)
    num_heads, head_dim, width = 3, 8, 5
    stored = [
        torch.randn(num_heads * head_dim, width, generator=generator, dtype=torch.float64) for _ in range(2)
    ]
    inputs = torch.randn(2, width, generator=generator, dtype=torch.float64)
    positions = (11, 4)

    def score(weights, to_pairs):
        query, key = (
            rotate(to_pairs((weight @ x).view(num_heads, head_dim)), position)
            for weight, x, position in zip(weights, inputs, positions, strict=True)
        )
        return (query * key).sum((-1, -2))

    def neighbours(heads):
        return heads.view(num_heads, head_dim // 2, 2)

    def halves(heads):
        return heads.view(num_heads, 2, head_dim // 2).transpose(1, 2)

    expected = score(stored, neighbours)
    converted = [undo_rotary_permutation(weight, num_heads) for weight in stored]
    torch.testing.assert_close(score(converted, halves), expected)
    assert not torch.allclose(score(stored, halves), expected)  # without the permutation it would not be


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("the the", ["t", "he", "Ġthe"]),
        ("12 the", ["1", "2", "Ġthe"]),  # digits stand alone, although "1 2" is a merge
        ("<|im_start|>the<|im_end|>", ["<|im_start|>", "t", "he", "<|im_end|>"]),
        ("é\n", ["Ã", "©", "Ċ"]),
    ],
)
def test_tokenizer_splits_digits_and_keeps_special_tokens_whole(convert, tiny_llama_weights, text, pieces):
    folder = convert(tiny_llama_weights())
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert encoded.tokens == pieces
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == 263


def test_tokenizer_config_names_special_tokens_and_template(convert, tiny_llama_weights):
    config = json.loads((convert(tiny_llama_weights()) / "tokenizer_config.json").read_text())
    assert config["bos_token"] == "<|im_start|>"
    assert config["eos_token"] == config["pad_token"] == "<|im_end|>"
    assert config["unk_token"] == "<|endoftext|>"
    assert "<|im_start|>" in config["chat_template"]
    assert config["model_max_length"] == 128


def test_conversion_is_deterministic_and_reports_every_tensor(tmp_path, convert, tiny_llama_weights):
    folder = convert(tiny_llama_weights())
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    reports = []
    convert_gguf(tmp_path / "tiny.gguf", folder, lambda *progress: reports.append(progress))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
    assert reports == [(num_done, 20) for num_done in range(1, 21)]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"arch": "qwen2"}, "qwen2"),
        ({"tokenizer__ggml__pre": "qwen2"}, "qwen2"),
        ({"tokenizer__ggml__model": "llama"}, "llama"),
        ({"llama__rope__scaling__type": "linear"}, "linear"),
        ({"llama__rope__dimension_count": 8}, "all 16 dimensions"),
        ({"llama__attention__head_count": None}, "head_count"),
        ({"tokenizer__ggml__merges": ["q x"]}, "q x"),
        ({"tokenizer__ggml__merges": None}, "merges"),
        ({"tokenizer__ggml__tokens": ["a", "a"]}, "repeats 1"),
        ({"tokenizer__ggml__token_type": [1, 1]}, "token_type"),
        ({"tokenizer__ggml__bos_token_id": 5000}, "metadata"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(convert, tiny_llama_weights, fields, named):
    with pytest.raises(ModelLoadError, match=named):
        convert(tiny_llama_weights(), **fields)


@pytest.mark.parametrize("length", [0, 3, 100, 4000, -1000])
def test_a_truncated_file_is_refused(tmp_path, write_gguf, tiny_llama_weights, length):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama_weights())
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf"):
        convert_gguf(path, tmp_path, ignore_progress)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"\x93NUMPY" * 100)
    with pytest.raises(ModelLoadError, match=r"a\.gguf"):
        convert_gguf(tmp_path / "a.gguf", tmp_path, ignore_progress)
    with pytest.raises(ModelLoadError, match=r"gone\.gguf"):
        convert_gguf(tmp_path / "gone.gguf", tmp_path, ignore_progress)


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "blk.0.attn_q.bias", "blk.x.attn_q.weight", "blk.0.ssm.weight"]
)
def test_an_unknown_tensor_is_refused(name):
    with pytest.raises(ModelLoadError, match=name):
        hugging_face_name(name)
