"""The embedded model as pulled: its pinned bytes, sizes and answers. Skipped where it is not pulled."""

import pytest
import torch

from engine.model.config import ModelConfig
from engine.weights.cache import cache_folder
from engine.weights.digest import file_digest, folder_digest
from engine.weights.mapping import llama_mapping
from engine.weights.pull import PACKAGED_MODELS, is_complete
from engine.weights.shards import open_weights

WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
BASE_MODEL_DIGEST = "d7e1f554d5b12a5af2ba8a890400800d19bb02fe90bdf58c09c5e69ae9ec33bb"


@pytest.fixture
def folder():
    path = cache_folder() / "smollm2"
    if not is_complete(path, PACKAGED_MODELS["smollm2"]):
        pytest.skip("smollm2 is not in the cache: eyas pull smollm2")
    return path


def test_converted_bytes_are_the_reference_weights(folder):
    assert file_digest(folder / "model.safetensors") == WEIGHTS_SHA256
    assert folder_digest(folder) == BASE_MODEL_DIGEST


def test_config_is_the_published_one(folder):
    assert ModelConfig.load(folder) == ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        rope_scaling=None,
        max_position=8192,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=1,
        eos_token_ids=(2,),
        dtype="bfloat16",
    )


def test_the_mapping_names_every_stored_tensor(folder):
    config = ModelConfig.load(folder)
    mapping = llama_mapping(
        num_layers=config.num_layers,
        query_size=config.query_size,
        kv_size=config.kv_size,
        intermediate_size=config.intermediate_size,
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )
    source = open_weights(folder)
    assert source.names() == mapping.placements.keys()
    assert all(source.read(name).isfinite().all() for name in source.names())


def test_the_model_answers_through_its_chat_template(folder):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


def test_digits_are_single_tokens(folder):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("In 1234").tokens == ["In", "Ġ", "1", "2", "3", "4"]
    text = "naïve café 🙂 x=3.14\n\tdef f():"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
