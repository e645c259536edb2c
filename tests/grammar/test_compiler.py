"""Grammars are compiled in another process, within limits, once each; what breaks it costs one request."""

import asyncio
import os
import signal

import pytest
import pytest_asyncio

from engine.errors import ModelLoadError, RequestError
from engine.grammar import compiler as module
from engine.grammar.compiler import CompileCache, GrammarCompiler
from engine.guidance import Grammar
from tests.app.harness import write_model

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def compiler(folder):
    compiler = GrammarCompiler(folder, 258, (1,), "digest")
    yield compiler
    compiler.close()


def pid_of(compiler: GrammarCompiler) -> int:
    return compiler._worker._process.pid


async def test_a_grammar_is_compiled_once_and_keeps_its_field_name(compiler):
    first, again = await asyncio.gather(
        compiler.compile(Grammar("regex", "[a-z]+", "guided_regex")),
        compiler.compile(Grammar("regex", "[a-z]+", "structured_outputs.regex")),
    )
    assert first.compiled
    assert first.compiled is again.compiled
    assert (first.parameter, again.parameter) == ("guided_regex", "structured_outputs.regex")
    os.kill(pid_of(compiler), signal.SIGSTOP)  # what is remembered needs no process
    try:
        assert (await compiler.compile(Grammar("regex", "[a-z]+"))).compiled is first.compiled
    finally:
        os.kill(pid_of(compiler), signal.SIGCONT)


async def test_a_malformed_grammar_is_refused_and_the_process_goes_on(compiler):
    await compiler.compile(Grammar("regex", "a"))
    pid = pid_of(compiler)
    with pytest.raises(RequestError, match="not valid") as refusal:
        await compiler.compile(Grammar("regex", "(", "guided_regex"))
    assert refusal.value.parameter == "guided_regex"
    assert pid_of(compiler) == pid
    assert (await compiler.compile(Grammar("regex", "b"))).compiled


async def test_a_process_that_dies_costs_one_grammar(compiler):
    await compiler.compile(Grammar("regex", "a"))
    pid = pid_of(compiler)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RequestError, match="broke the grammar compiler"):
        await compiler.compile(Grammar("regex", "new", "guided_regex"))
    assert (await compiler.compile(Grammar("regex", "new"))).compiled
    assert pid_of(compiler) != pid


async def test_a_grammar_that_takes_too_long_is_refused_and_its_process_ended(folder):
    compiler = GrammarCompiler(folder, 258, (1,), "digest", compile_seconds=0.5)
    await compiler.compile(Grammar("regex", "a"))
    pid = pid_of(compiler)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RequestError, match=r"longer than 0\.5 s"):
        await compiler.compile(Grammar("regex", "new"))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    compiler.close()


async def test_a_grammar_that_grows_too_large_is_refused(compiler, monkeypatch):
    monkeypatch.setattr(module, "MAX_COMPILED_BYTES", 1000)
    with pytest.raises(RequestError, match="of 1000 allowed"):
        await compiler.compile(Grammar("regex", "x{90}y{90}"))


async def test_a_caller_that_leaves_disturbs_nobody(compiler):
    leaver = asyncio.create_task(compiler.compile(Grammar("regex", "(left|right)")))
    stayer = asyncio.create_task(compiler.compile(Grammar("regex", "(left|right)")))
    other = asyncio.create_task(compiler.compile(Grammar("regex", "other")))
    await asyncio.sleep(0)
    leaver.cancel()
    assert (await stayer).compiled
    assert (await other).compiled
    assert leaver.cancelled()


async def test_a_model_without_a_readable_tokenizer_is_a_load_error(tmp_path):
    compiler = GrammarCompiler(tmp_path, 258, (1,), "digest")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        await compiler.compile(Grammar("regex", "a"))
    assert compiler._worker is None
    compiler.close()


async def test_the_cache_drops_what_was_used_longest_ago():
    cache = CompileCache(max_bytes=10)
    first, second, third = (Grammar("regex", text) for text in "abc")
    cache.put(first, "d", b"1234")
    cache.put(second, "d", b"1234")
    assert cache.get(first, "other tokenizer") is None
    assert cache.get(first, "d") == b"1234"
    cache.put(third, "d", b"1234")
    assert cache.get(second, "d") is None
    assert cache.get(first, "d") == cache.get(third, "d") == b"1234"
