"""One-line patches that bring faults of other engines back, each beside the test that must fail under it.

Which kind is covered by which tests is in `kinds`, applying and running is left to `test_patches`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """In `file` the only occurrence of `old` becomes `new`; then `test` fails."""

    kind: str
    file: str
    old: str
    new: str
    test: str


PATCHES = (
    Patch(
        "tree-commit-compaction",
        "engine/kvcache/kv_pool.py",
        "k.index_copy_(1, slots, scratch.k if rows is None else scratch.k[:, rows])",
        "k.index_copy_(1, slots, scratch.k if rows is None else scratch.k[:, : len(rows)])",
        "tests/exactness/test_every_path.py::test_every_leaf_is_reached_and_each_call_keeps_its_whole_path",
    ),
    Patch(
        "tree-residual-wrong-row",
        "engine/sampling/verify.py",
        "masked = warp(logits[rows, node], sampling, output_counts, position)",
        "masked = warp(logits[rows, path[0]], sampling, output_counts, position)",
        "tests/sampling/test_verify.py::test_greedy_rows_walk_as_one_row_at_a_time",
    ),
    Patch(
        "draft-q-forced-to-one",
        "engine/sampling/verify.py",
        "is_under = uniforms[:, rank] * q_x < p_x",
        "is_under = uniforms[:, rank] < p_x",
        "tests/exactness/test_law.py::test_every_event_of_a_step_has_its_exact_probability",
    ),
    Patch(
        "non-greedy-quality",
        "engine/sampling/verify.py",
        "is_under = uniforms[:, rank] * q_x < p_x",
        "is_under = uniforms[:, rank] * q_x < p_x * (1.1 if rank == 2 else 1.0)",
        "tests/exactness/test_law.py::test_every_event_of_a_step_has_its_exact_probability",
    ),
    Patch(
        "duplicate-siblings",
        "engine/sampling/verify.py",
        "return siblings.nodes.masked_fill(~is_match, tree.num_nodes).amin(1)",
        "return siblings.nodes.masked_fill(~is_match, -1).amax(1) % (tree.num_nodes + 1)",
        "tests/sampling/test_verify.py::test_duplicate_siblings_take_the_first",
    ),
    Patch(
        "penalty-once-per-step",
        "engine/sampling/verify.py",
        "output_counts.scatter_add_(1, token[:, None], is_open[:, None].int())",
        "output_counts.scatter_add_(1, token[:, None], is_open[:, None].int() * 0)",
        "tests/sampling/test_verify.py::test_frequency_penalty_counts_the_path_within_one_step",
    ),
    Patch(
        "nan-accepts-all",
        "engine/sampling/verify.py",
        "is_reached = is_open & is_finite[:, None]",
        "is_reached = is_open.clone()",
        "tests/sampling/test_verify.py::test_fault_on_the_path_accepts_nothing_and_spares_its_neighbours",
    ),
    Patch(
        "eos-before-min-tokens",
        "engine/sampling/warp.py",
        "(position < sampling.stop_from)",
        "(position + 1 < sampling.stop_from)",
        "tests/sampling/test_warp.py::test_stop_tokens_are_masked_before_their_position_only",
    ),
    Patch(
        "eos-in-run",
        "engine/scheduler/stopping.py",
        "if token_id in self.stop_token_ids and total >= self.min_output:",
        "if token_ids[-1] in self.stop_token_ids and total >= self.min_output + len(token_ids):",
        "tests/test_engine.py::test_a_stop_token_inside_a_path_ends_the_answer_there",
    ),
    Patch(
        "short-of-max-tokens",
        "engine/scheduler/stopping.py",
        "if total >= self.max_output:",
        "if num_output + len(token_ids) >= self.max_output:",
        "tests/exactness/test_identity.py::test_max_tokens_is_met_exactly",
    ),
    Patch(
        "overlong-zombie",
        "engine/scheduler/scheduler.py",
        "        self._check_fit(sequence, rule)\n",
        "",
        "tests/scheduler/test_scheduler.py::test_a_request_that_can_never_run_is_refused_and_leaves_nothing",
    ),
    Patch(
        "stale-after-preempt",
        "engine/scheduler/scheduler.py",
        "            if progress.num_in_flight:\n",
        "            if progress.num_in_flight > 9:\n",
        "tests/scheduler/test_simulation.py::test_a_sequence_preempted_in_flight_keeps_its_tokens_and_waits_for_them",
    ),
    Patch(
        "publish-before-write",
        "engine/scheduler/scheduler.py",
        "num_tokens = progress.num_publishable(self._config.draft_window)",
        "num_tokens = len(progress.sequence.tokens)",
        "tests/scheduler/test_simulation.py::test_outputs_equal_plain_decoding_whatever_happens",
    ),
    Patch(
        "boundary-block",
        "engine/kvcache/kv_cache.py",
        "for idx in range((len(sequence.tokens) - 1) // self.pool.block_size):",
        "for idx in range(len(sequence.tokens) // self.pool.block_size):",
        "tests/kvcache/test_kv_cache.py::test_a_hit_leaves_out_the_root",
    ),
    Patch(
        "abort-leak",
        "engine/kvcache/kv_cache.py",
        "for block_id in reversed(sequence.block_ids):",
        "for block_id in reversed(sequence.block_ids[1:]):",
        "tests/scheduler/test_simulation.py::test_aborts_at_random_moments_give_everything_back",
    ),
    Patch(
        "off-then-on",
        "engine/runner/slot_ops.py",
        "start = torch.where(first > draft_len, first, draft_start)",
        "start = draft_start",
        "tests/exactness/test_draft_cache.py::test_off_rows_catch_up_within_the_window_and_forget_beyond_it",
    ),
    Patch(
        "wrong-aux-layer",
        "engine/model/llama.py",
        "tapped[layer_idx] = residual",
        "tapped[layer_idx] = x",
        "tests/model/test_llama.py::test_features_are_the_named_hidden_states_in_every_chunk",
    ),
    Patch(
        "draft-memory-not-counted",
        "engine/runner/memory.py",
        "    if draft is not None:\n",
        "    if draft is None:\n        draft = None\n    elif draft.num_layers > 9:\n",
        "tests/runner/test_memory.py::test_a_block_counts_what_the_pools_of_both_networks_allocate",
    ),
    Patch(
        "vocab-mismatch",
        "engine/draft/config.py",
        '("vocabulary size", self.target_vocab_size, target.vocab_size),',
        '("vocabulary size", target.vocab_size, target.vocab_size),',
        "tests/draft/test_config.py::test_another_target_is_refused_by_the_first_difference",
    ),
    Patch(
        "draft-max-position",
        "engine/draft/config.py",
        "if self.max_position < target.max_position:",
        "if self.max_position < 0:",
        "tests/draft/test_config.py::test_another_target_is_refused_by_the_first_difference",
    ),
    Patch(
        "tokens-not-counted",
        "engine/counters.py",
        "self.num_output_tokens += sum(num_tokens)",
        "self.num_output_tokens += len(num_tokens)",
        "tests/test_engine.py::test_the_counters_add_up",
    ),
    Patch(
        "k-counted-differently",
        "app/speculation_stats.py",
        "1 + self.num_accepted / num_steps if num_steps",
        "self.num_accepted / num_steps if num_steps",
        "tests/app/test_speculation_stats.py::test_steps_are_counted_by_the_drafts_they_kept_and_plain_ones_are_not",
    ),
    Patch(
        "utf8-split",
        "engine/detokenizer.py",
        "num_held = len(text) - len(text.rstrip(REPLACEMENT))",
        "num_held = 0",
        "tests/test_detokenizer.py::test_joined_deltas_equal_the_text_for_runs_of_any_size",
    ),
    Patch(
        "stop-early-in-run",
        "engine/stop_strings.py",
        "            if matched is not None:\n",
        "            if matched is not None and idx == len(buffer) - 1:\n",
        "tests/test_stop_strings.py::test_stop_at_each_position_of_a_run_cuts_there",
    ),
    Patch(
        "cap-masks-stop",
        "app/answer.py",
        "        if self.is_over:\n            return text\n",
        "        if self.is_over and delta.finish_reason is None:\n            return text\n",
        "tests/app/test_answer.py::test_stop_string_in_the_last_allowed_token_wins_over_length",
    ),
    Patch(
        "count-mismatch",
        "app/answer.py",
        "self.num_tokens = self._detokenizer.num_tokens_for(self._num_unscanned + scan.end)",
        "self.num_tokens = len(self._detokenizer.text_lens)",
        "tests/app/test_answer.py::test_stop_string_cuts_text_and_count_at_its_last_token",
    ),
    Patch(
        "only-last-token-streamed",
        "app/answer.py",
        "shown = token_ids[:-1] if self._ends_with_stop_token(delta) else token_ids",
        "shown = token_ids[:-1] if self._ends_with_stop_token(delta) else token_ids[-1:]",
        "tests/app/test_answer.py::test_answer_does_not_depend_on_how_steps_were_cut",
    ),
    Patch(
        "tail-not-flushed",
        "app/answer.py",
        "            text += self._stops.flush()\n",
        "",
        "tests/app/test_answer.py::test_nothing_held_back_is_lost_at_the_end",
    ),
    Patch(
        "param-dropped",
        "app/protocol.py",
        "min_p=_default(self.min_p, 0.0),",
        "min_p=0.0,",
        "tests/app/test_endpoints.py::test_sampling_fields_reach_the_engine",
    ),
    Patch(
        "bad-value-poisons-batch",
        "engine/request.py",
        "0.01 <= self.repetition_penalty <= 10.0,",
        "0.0 <= self.repetition_penalty <= 10.0,",
        "tests/app/test_openapi.py::test_field_is_taken_at_its_bounds_and_refused_beyond",
    ),
    Patch(
        "seed-ignored",
        "app/choices.py",
        "seed=_derive_seed(options.sampling.seed, choice)",
        "seed=None",
        "tests/app/test_endpoints.py::test_choices_get_seeds_of_their_own_and_the_first_keeps_the_given_one",
    ),
    Patch(
        "disconnect-continues",
        "app/main.py",
        "            response.cancel()  # without effect on one that has ended\n",
        "            pass\n",
        "tests/app/test_handle_backend.py::test_stream_that_is_left_is_cancelled",
    ),
    Patch(
        "tool-delta",
        "app/streaming.py",
        'return {"index": call.call_idx, "function": {"arguments": call.arguments}}',
        'return {"function": {"arguments": call.arguments}}',
        "tests/app/test_tools.py::test_deltas_of_a_call_have_its_id_once_and_its_number_always",
    ),
    Patch(
        "finish-reason-missing",
        "app/streaming.py",
        "pieces.append(self._choice(delta.index, {}, delta.end))",
        "pieces.append(self._choice(delta.index, {}, None))",
        "tests/app/test_endpoints.py::test_chat_stream_is_exact_to_the_byte",
    ),
    Patch(
        "usage-unasked",
        "app/streaming.py",
        "if not self._includes_usage and not self._includes_metrics:",
        "if self._includes_metrics:",
        "tests/app/test_endpoints.py::test_usage_comes_last_and_only_when_asked_for",
    ),
    Patch(
        "latency-per-chunk",
        "app/server.py",
        "self._per_token.observe((now - first_time) / (delta.num_tokens - num_first))",
        "self._per_token.observe(now - first_time)",
        "tests/app/test_metrics_text.py::test_first_token_and_time_per_token_make_the_whole_time",
    ),
    Patch(
        "event-cut-at-line-end",
        "app/streaming.py",
        "        text = text.replace(char, escaped)\n",
        "        text = text.replace(escaped, char)\n",
        "tests/app/test_endpoints.py::test_line_ends_of_unicode_do_not_cut_an_event",
    ),
)
