"""The rules of the source tree, as tables. How they are checked is left to the modules beside this one.

An exception is a row here with its reason, or it is not allowed. A row that nothing needs fails a test.
"""

SOURCE_FOLDERS = ("engine", "app", "ops", "loadtest", "benchmarks")

# Import floors of `engine`: a file imports from lower floors and from its own package only. Packages of one
# floor do not see each other, but for chains: "a < b" lets b import a.
FLOORS: tuple[tuple[str, ...], ...] = (
    (
        (
            "errors < precision < config < logprobs < guidance < request < row_kind < tree < batch"
            " < step_stats < draft_guide < speculation < step_rows"
        ),
    ),
    (
        "parallel",
        "kernels",
        "draft_restart",
        "draft_status < dispatch_stats < stats < request_check",
        "tap",
        "detokenizer",
        "environment",
        "stop_strings",
        "weights.json_object < model.config",
    ),
    ("kvcache < layers", "sampling", "grammar", "weights"),
    ("attention", "transfer"),
    ("model < draft", "scheduler", "dispatcher"),
    ("runner",),
    (
        " < ".join(
            (
                *("counters", "step_times", "policy", "draft_swap", "engine", "synthetic", "messages"),
                *("core", "core_link", "async_engine"),
            )
        ),
        "near_tie",
    ),
    ("training",),
)

# Modules that stand on another floor than their package, and why.
FLOOR_EXCEPTIONS = {
    "engine.weights.json_object": "opens a JSON file for every config; it knows no weights",
    "engine.model.config": "plain data that layers read too; it holds no network",
}

# What each part above the engine may import of the others.
PART_IMPORTS: dict[str, tuple[str, ...]] = {
    "app": ("engine", "ops.registry", "ops.tracing"),
    "ops": ("engine",),
    "loadtest": (),
    "benchmarks": ("engine", "app", "ops", "loadtest"),
}
# `engine` above means the names that `engine/__init__.py` exports. Modules that may reach further, and why.
DEEP_IMPORTS: dict[str, tuple[str, ...]] = {
    # The command line names every entry point of the repository.
    "app.cli": ("engine.training", "ops"),
    # They drive the making of drafts, of which a server needs nothing.
    **dict.fromkeys(
        (
            "app.cli_train",
            "app.cli_draft",
            "app.cli_synth",
            "app.cli_eval",
            "app.evaluation",
            "app.training_data",
            "app.chat_tokens",
            "app.train_workers",
        ),
        (
            "engine.training",
            "engine.draft",
            "engine.tree",
            "engine.config",
            "engine.model.config",
            "engine.weights",
        ),
    ),
    # They ask a server as a client does.
    **dict.fromkeys(("app.cli_validate", "app.speedup"), ("loadtest",)),
    # Measures single parts.
    "benchmarks": ("engine",),
}

# Policy and text: state machines over plain values. No torch, also not through what they import.
NO_TORCH = (
    "engine.tree",
    "engine.detokenizer",
    "engine.stop_strings",
    "engine.kvcache.block_pool",
    "engine.kvcache.kv_cache",
    "engine.scheduler",
    "engine.dispatcher",
    "app.autoscaling",
    "app.speedup_verdict",
    "ops.rollout.analysis",
)
# Policy decides from its arguments: the same history gives the same choice.
NO_CLOCK_NO_IO = (
    "engine.kvcache.block_pool",
    "engine.kvcache.kv_cache",
    "engine.scheduler",
    "engine.dispatcher",
    "app.autoscaling",
    "app.speedup_verdict",
    "ops.rollout.analysis",
)
CLOCKS_AND_IO = frozenset(
    {
        *("time", "datetime", "random", "secrets", "os", "io", "pathlib", "shutil", "tempfile", "socket"),
        *("threading", "multiprocessing", "subprocess", "asyncio", "requests", "httpx", "aiohttp"),
    }
)
HEAVY_LIBRARIES = frozenset({"torch", "triton", "xformers", "ray"})

# `engine` imports with torch alone. Any other library is optional there: imported inside the function that
# needs it, and only in these modules. Elsewhere libraries are imported at the top like everything else.
OPTIONAL_LIBRARIES: dict[str, tuple[str, ...]] = {
    "gguf": ("engine.weights",),
    "huggingface_hub": ("engine.weights",),
    "numpy": ("engine.weights", "engine.training"),
    "safetensors": ("engine.weights",),
    "tokenizers": ("engine.weights", "engine.training"),
    "tqdm": ("engine.weights", "engine.training"),
    "triton": ("engine.kernels", "engine.attention.triton"),
    "xformers": ("engine.attention.xformers",),
    "xgrammar": ("engine.grammar",),
}
# Modules made of an optional library: they import it at the top, and are themselves imported inside the
# function that chose them.
LIBRARY_MODULES = (
    "engine.kernels",
    "engine.grammar.xgrammar_backend",
    "engine.layers.triton_ops",
    "engine.sampling.triton_verify",
    "engine.draft.triton_ops",
    "engine.runner.triton_slot_ops",
    "engine.attention.triton",
    "engine.attention.xformers",
)
# Modules outside `engine` that may import inside functions, and why.
LAZY_IMPORTERS: dict[str, str] = {
    "app.cli": "a command loads only what it runs: help and bench must not wait for Ray",
    "app.cli_train": "several workers need Ray Train, which is an extra and takes seconds to import",
    "benchmarks.tree_attention": "compares with xformers where it is installed",
    "ops.rollout.cli": "a rollout on this machine must not wait for the client of Kubernetes",
    "ops.tracing.export": "the exporters are an extra, and importing gRPC takes a second",
    "app.cli_serve": "a bad configuration and a taken port are told before Ray starts, which takes seconds",
}

# What a machine may lack while `engine` must still import.
ABSENT_LIBRARIES = (
    *("ray", "fastapi", "starlette", "uvicorn", "pydantic", "transformers", "tokenizers", "xgrammar"),
    *("safetensors", "numpy", "gguf", "huggingface_hub", "xformers", "tqdm", "yaml", "scipy"),
    *("kubernetes", "opentelemetry", "locust", "prometheus_client", "requests", "httpx"),
)

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60  # aim for 40
MAX_CORE_LINES = 5000
# Longer functions and their reason, as "module:function".
LONG_FUNCTIONS: dict[str, str] = {
    "engine.kernels.tree_attention:_tree_attention_kernel": "a launch is one function, half parameters",
    "engine.kernels.prefill_attention:_prefill_kernel": "a launch is one function, half parameters",
    "engine.kernels.step_rows:_open_kernel": "a launch is one function, half parameters",
    "engine.kernels.step_rows:_commit_kernel": "a launch is one function, half parameters",
}

# What a reader must hold to change a decode step: the vocabulary, the loop, policy, and the step itself by
# torch. Left out are the sizes of networks as they are read from files, prefill, stop strings (text, judged
# after the step), starting the process, what is counted of steps and learnt from them (of the dispatcher the
# protocol is in), and what one device does faster (packed weights, kernels, graphs).
CORE = (
    *("engine.errors", "engine.config", "engine.request", "engine.batch", "engine.speculation"),
    *("engine.engine", "engine.core", "engine.async_engine", "engine.messages"),
    "engine.detokenizer",
    *("engine.tree.topology", "engine.tree.library", "engine.kvcache", "engine.scheduler"),
    *("engine.dispatcher.dispatcher", "engine.model.llama", "engine.draft.head", "engine.draft.drafter"),
    *("engine.layers.decoder", "engine.layers.norm", "engine.layers.ops", "engine.layers.rotary"),
    *("engine.attention.backend", "engine.attention.merge", "engine.attention.reference"),
    *("engine.sampling.noise", "engine.sampling.sampler", "engine.sampling.truncation"),
    *("engine.sampling.verify", "engine.sampling.warp"),
    *("engine.runner.runner", "engine.runner.decode_step", "engine.runner.slot_state"),
    *("engine.step_rows", "engine.runner.slot_ops"),
)

# Words that say nothing about a thing: no file, class or function is named so.
EMPTY_WORDS = frozenset({"util", "utils", "helper", "helpers", "manager", "misc", "common", "stuff"})
# Verbs that hide the effect.
EMPTY_VERBS = frozenset({"handle", "do", "process"})
# Names that a library's base class dictates.
DICTATED_NAMES = frozenset({"do_GET", "do_POST", "do_PUT", "do_PATCH", "do_DELETE", "do_HEAD"})

# Rules that ruff and mypy check already: here only, that they stay switched on.
RUFF_SAMPLES: dict[str, str] = {
    "ANN201": "def choose():\n    return 1\n",
    "C901": "def f(x: int) -> int:\n"
    + "".join(f"    if x == {i}:\n        return {i}\n" for i in range(11))
    + "    return x\n",
    "ERA001": "# x = 1\n",
    "PLW0603": "TOTAL = 0\n\n\ndef add() -> None:\n    global TOTAL\n    TOTAL += 1\n",
    "T201": 'print("loud")\n',
    "TID252": "from .errors import EyasError as EyasError\n",
}
