"""Kinds of faults that engines of this sort have had, and which test would find each in ours.

A kind without tests says why it cannot occur here. That the tests exist is checked by `test_kinds`; one-line
patches that bring kinds back are in `patches`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """`tests` as pytest names them, or `absent`: what we lack that the fault needs."""

    tests: tuple[str, ...] = ()
    absent: str = ""


def _found(*tests: str) -> Kind:
    return Kind(tuple(f"tests/{test}" for test in tests))


KINDS: dict[str, Kind] = {
    # Wrong output
    "tree-near-tie": _found(
        "exactness/test_identity.py::test_batch_with_an_oracle_equals_plain_decoding_alone",
        "test_near_tie.py::test_the_best_token_is_no_distance_from_itself_and_others_are_below",
    ),
    "tree-commit-compaction": _found(
        "exactness/test_every_path.py::test_every_leaf_is_reached_and_each_call_keeps_its_whole_path",
        "exactness/test_draft_cache.py::test_the_draft_cache_equals_that_of_a_fresh_prefill_of_the_same_text",
    ),
    "draft-kv-ghost": _found(
        "exactness/test_draft_cache.py::test_the_draft_cache_equals_that_of_a_fresh_prefill_of_the_same_text"
    ),
    "single-int-rewind": _found(
        "training/test_evaluate.py::test_a_tree_that_holds_another_never_accepts_less"
    ),
    "degenerate-tree": _found(
        "tree/test_topology.py::test_corner_shapes_are_trees",
        "exactness/test_seeded_identity.py::test_every_tree_emits_the_tokens_of_plain_decoding",
    ),
    "draft-hidden-drift": _found(
        "exactness/test_draft_cache.py::test_the_draft_cache_equals_that_of_a_fresh_prefill_of_the_same_text"
    ),
    "slot-order": _found(
        "exactness/test_identity.py::test_requests_with_trees_of_their_own_share_a_batch",
        "scheduler/test_simulation.py::test_a_slot_freed_in_flight_may_have_a_new_owner_at_once",
    ),
    "batch-dependence": _found(
        "exactness/test_identity.py::test_batch_with_an_oracle_equals_plain_decoding_alone"
    ),
    "gibberish-eagle3": _found(
        "exactness/test_smollm2_identity.py::test_the_shipped_draft_changes_no_token_and_is_worth_its_work"
    ),
    "wrong-aux-layer": _found(
        "model/test_llama.py::test_features_are_the_named_hidden_states_in_every_chunk"
    ),
    "acceptance-poisoned": _found("faults/test_served.py::test_acceptance_poisoned"),
    # Sampling
    "draft-q-forced-to-one": _found(
        "exactness/test_law.py::test_every_event_of_a_step_has_its_exact_probability"
    ),
    "tree-residual-wrong-row": _found(
        "exactness/test_law.py::test_every_event_of_a_step_has_its_exact_probability",
        "sampling/test_verify.py::test_greedy_rows_walk_as_one_row_at_a_time",
    ),
    "top-p-edge": _found("sampling/test_truncation.py::test_kept_tokens_are_those_of_a_sort"),
    "param-dropped": _found(
        "faults/test_served.py::test_param_dropped",
        "app/test_endpoints.py::test_sampling_fields_reach_the_engine",
    ),
    "non-greedy-quality": _found(
        "exactness/test_law.py::test_every_event_of_a_step_has_its_exact_probability"
    ),
    "duplicate-siblings": _found(
        "exactness/test_law.py::test_repeated_siblings_keep_the_law",
        "sampling/test_verify.py::test_duplicate_siblings_take_the_first",
    ),
    "penalty-once-per-step": _found(
        "sampling/test_verify.py::test_frequency_penalty_counts_the_path_within_one_step"
    ),
    "eos-before-min-tokens": _found(
        "sampling/test_verify.py::test_stop_token_waits_for_its_position",
        "sampling/test_warp.py::test_stop_tokens_are_masked_before_their_position_only",
    ),
    "bad-value-poisons-batch": _found(
        "app/test_openapi.py::test_field_is_taken_at_its_bounds_and_refused_beyond",
        "app/test_bad_input.py::test_bad_chat_field_is_refused_by_name",
    ),
    # Log-probabilities and grammars
    "logprob-zero": _found(
        "exactness/test_logprobs.py::test_every_emitted_token_has_the_targets_own_logprob"
    ),
    "logprob-only-first": _found(
        "app/test_logprobs.py::test_chat_tells_every_token_with_its_true_bytes",
        "app/test_logprobs.py::test_every_choice_has_its_own",
    ),
    "logprob-past-stop": _found(
        "app/test_logprobs.py::test_stop_inside_a_run_cuts_logprobs_where_it_cuts_usage",
        "exactness/test_logprobs.py::test_logprobs_end_with_the_stop_token_inside_an_accepted_path",
    ),
    "logprob-path-crash": _found(
        "exactness/test_logprobs.py::test_every_emitted_token_has_the_targets_own_logprob",
        "exactness/test_logprobs.py::test_prefix_hits_and_chunks_change_no_logprob",
    ),
    "side-output-misattributed": _found(
        "exactness/test_logprobs.py::test_rows_that_ask_for_more_less_or_nothing_share_a_batch"
    ),
    "grammar-outside-tree": _found(
        "exactness/test_guided.py::test_guided_and_plain_rows_side_by_side_equal_plain_decoding_alone",
        "exactness/test_guided.py::test_drafts_that_are_all_wrong_change_nothing",
    ),
    "grammar-desync-kills-engine": _found(
        "exactness/test_guided.py::test_a_grammar_that_breaks_fails_its_request_alone",
        "app/test_guided.py::test_thirty_guided_calls_among_plain_ones_and_broken_ones_are_all_answered",
    ),
    "grammar-rollback": _found("grammar/test_xgrammar_backend.py::test_tokens_taken_back_leave_no_trace"),
    "grammar-truncated": _found(
        "grammar/test_xgrammar_backend.py::test_every_answer_to_a_schema_parses_and_validates"
    ),
    "grammar-no-finish": _found(
        "exactness/test_guided.py::test_an_answer_may_be_empty_and_must_end_where_nothing_else_may_follow",
        "grammar/test_xgrammar_backend.py::test_every_answer_of_kind_json_is_an_object_on_one_line",
    ),
    "grammar-cut-vocabulary": _found(
        "exactness/test_guided.py::test_a_draft_head_with_a_cut_vocabulary_keeps_the_grammar"
    ),
    # Where an answer ends
    "stop-early-in-run": _found("test_stop_strings.py::test_stop_at_each_position_of_a_run_cuts_there"),
    "cap-masks-stop": _found(
        "app/test_answer.py::test_stop_string_in_the_last_allowed_token_wins_over_length"
    ),
    "eos-in-run": _found(
        "test_engine.py::test_a_stop_token_inside_a_path_ends_the_answer_there",
        "test_engine.py::test_a_request_ends_at_the_models_own_stop_unless_it_ignores_it",
    ),
    "short-of-max-tokens": _found("exactness/test_identity.py::test_max_tokens_is_met_exactly"),
    "count-mismatch": _found("app/test_answer.py::test_stop_string_cuts_text_and_count_at_its_last_token"),
    # The edge of the context
    "draft-max-position": _found(
        "draft/test_config.py::test_another_target_is_refused_by_the_first_difference"
    ),
    "tree-past-the-end": _found(
        "exactness/test_identity.py::test_generation_runs_to_the_last_position_of_the_model"
    ),
    "long-prompt-slow": _found(
        "dispatcher/test_adaptive.py::test_trees_that_cost_three_times_what_the_table_says_are_left_within_a_few_steps",
        "dispatcher/test_simulation.py::test_a_few_seeds_stay_within_the_limits",
    ),
    "overlong-zombie": _found(
        "scheduler/test_scheduler.py::test_a_request_that_can_never_run_is_refused_and_leaves_nothing"
    ),
    "long-prompt-buffer": _found(
        "exactness/test_draft_cache.py::test_chunks_of_every_size_leave_the_same_cache_features_and_drafts"
    ),
    # Preemption, a host that is late
    "stale-after-preempt": _found(
        "scheduler/test_simulation.py::test_preemption_at_every_step_changes_nothing",
        "scheduler/test_simulation.py::test_a_sequence_preempted_in_flight_keeps_its_tokens_and_waits_for_them",
    ),
    "placeholder-minus-one": _found("sampling/test_verify.py::test_missing_tokens_never_match"),
    "spec-structured-preempt": _found(
        "exactness/test_guided.py::test_preempted_rows_go_on_where_their_grammar_was"
    ),
    "verify-hang-pool-full": _found(
        "scheduler/test_simulation.py::test_a_pool_filled_to_the_last_block_makes_progress"
    ),
    # The prefix cache
    "boundary-block": _found(
        "kvcache/test_kv_cache.py::test_a_hit_covers_the_shared_full_blocks_at_every_boundary",
        "kvcache/test_kv_cache.py::test_a_hit_leaves_out_the_root",
    ),
    "bigram-key": _found(
        "exactness/test_draft_cache.py::test_the_draft_cache_behind_a_prefix_hit_equals_a_fresh_one"
    ),
    "publish-before-write": _found(
        "scheduler/test_simulation.py::test_equal_prompts_admitted_in_one_step_do_not_read_each_other",
        "scheduler/test_simulation.py::test_outputs_equal_plain_decoding_whatever_happens",
    ),
    "reuse-corruption": _found(
        "exactness/test_identity.py::test_hits_chunks_and_preemption_together_change_nothing"
    ),
    "off-then-on": _found(
        "exactness/test_draft_cache.py::test_off_rows_catch_up_within_the_window_and_forget_beyond_it",
        "exactness/test_identity.py::test_topologies_that_change_by_row_and_step_change_nothing",
    ),
    # Leaks
    "abort-leak": _found("scheduler/test_simulation.py::test_aborts_at_random_moments_give_everything_back"),
    "disconnect-continues": _found(
        "app/test_endpoints.py::test_client_that_leaves_a_stream_ends_its_sequences",
        "app/test_handle_backend.py::test_stream_that_is_left_is_cancelled",
        "e2e/test_serve.py::test_clients_that_leave_give_their_blocks_back_and_the_others_end",
    ),
    "reserved-not-returned": _found(
        "scheduler/test_simulation.py::test_lookahead_blocks_come_back_for_every_block_size_and_depth"
    ),
    "slow-growth": _found("faults/test_served.py::test_slow_growth"),
    "draft-memory-not-counted": _found(
        "runner/test_memory.py::test_a_block_counts_what_the_pools_of_both_networks_allocate"
    ),
    # Seeds
    "seed-ignored": _found(
        "app/test_endpoints.py::test_choices_get_seeds_of_their_own_and_the_first_keeps_the_given_one",
        "exactness/test_seeded_identity.py::test_every_tree_emits_the_tokens_of_plain_decoding",
    ),
    "seed-parallel-gibberish": _found("faults/test_served.py::test_seed_parallel_gibberish"),
    # Slowness
    "disabled-not-free": _found("test_engine.py::test_plain_rows_draft_nothing"),
    "edge-collapse": _found(
        "dispatcher/test_static.py::test_what_can_be_reached_covers_every_number_of_rows_once"
    ),
    "accept-falls-with-batch": _found("faults/test_served.py::test_accept_falls_with_batch"),
    "ttft-tax": _found(
        "faults/test_prompts.py::test_speculation_adds_no_step_before_the_first_token_and_loses_no_prefix_hit"
    ),
    # Numbers that are none
    "nan-fp16": _found(
        "sampling/test_verify.py::test_nan_in_the_draft_falls_back_to_the_target",
        "exactness/test_non_finite.py::test_a_poisoned_draft_off_the_path_changes_no_token",
    ),
    "nan-accepts-all": _found(
        "sampling/test_verify.py::test_fault_on_the_path_accepts_nothing_and_spares_its_neighbours",
        "exactness/test_non_finite.py::test_a_request_with_nan_logits_fails_alone_and_leaves_no_trace",
    ),
    "nan-to-oov": _found(
        "attention/test_backends.py::test_the_reference_bears_any_value_in_unread_pages",
        "exactness/test_draft_cache.py::test_nothing_is_read_that_was_not_written",
    ),
    # Checkpoints
    "vocab-mismatch": _found("draft/test_config.py::test_another_target_is_refused_by_the_first_difference"),
    "missing-d2t": _found("draft/test_formats.py::test_a_checkpoint_that_does_not_fit_is_a_clear_error"),
    "wrong-algorithm": _found(
        "test_engine.py::test_a_draft_that_is_never_right_is_given_up_and_reported_once"
    ),
    "layout-matrix": _found(
        "draft/test_formats.py::test_an_eagle1_head_is_its_description",
        "draft/test_formats.py::test_an_eagle3_head_is_its_description",
        "draft/test_formats.py::test_a_speculators_head_is_its_description",
    ),
    "training-features": _found("training/test_unroll.py::test_unroll_equals_stepwise_drafting"),
    # Several devices
    "rank-divergence": Kind(absent="tensor parallelism"),
    "per-rank-decision": Kind(absent="tensor parallelism"),
    "verify-kernel-spins": _found(
        "test_async_engine.py::test_a_stopped_core_is_unhealthy_until_it_goes_on",
        "e2e/test_serve.py::test_core_that_dies_or_hangs_ends_its_streams_with_one_error_and_is_replaced",
    ),
    # CUDA graphs
    "padding-stale": _found(
        "gpu/test_graphs.py::test_every_replayed_step_emits_the_tokens_of_plain_decoding"
    ),
    "shrinking-batch": _found(
        "gpu/test_graphs.py::test_every_replayed_step_emits_the_tokens_of_plain_decoding"
    ),
    "mask-size": _found("test_speculation.py::test_bit_63_is_the_sign_of_the_mask"),
    "zero-length-row": _found(
        "attention/test_backends.py::test_a_dummy_row_is_finite_and_changes_no_other_row"
    ),
    # Other features
    "chunked-prefill-draft": _found(
        "exactness/test_draft_cache.py::test_chunks_of_every_size_leave_the_same_cache_features_and_drafts"
    ),
    "lora-draft": Kind(absent="LoRA"),
    "pd-mixed": Kind(absent="prefill and decoding apart"),
    "kv-dtype": _found(
        "gpu/test_synthetic.py::test_so_they_are_in_few_bits",
        "runner/test_precision.py::test_a_cache_in_eight_bits_is_refused_where_no_kernel_reads_it",
    ),
    # Metrics
    "rate-over-one": _found("faults/test_served.py::test_rate_over_one"),
    "tokens-not-counted": _found(
        "faults/test_served.py::test_tokens_not_counted", "test_engine.py::test_the_counters_add_up"
    ),
    "latency-per-chunk": _found(
        "app/test_metrics_text.py::test_first_token_and_time_per_token_make_the_whole_time"
    ),
    "k-counted-differently": _found(
        "app/test_speculation_stats.py::test_steps_are_counted_by_the_drafts_they_kept_and_plain_ones_are_not",
        "scheduler/test_scheduler.py::test_the_token_after_the_accepted_drafts_is_not_counted_as_accepted",
    ),
    # Drafts that change
    "draft-not-updated": _found("test_engine.py::test_a_draft_whose_weights_changed_is_refused"),
    "draft-garbage-after-resume": Kind(absent="sleep"),
    "wrong-weights-into-draft": _found("draft/test_loader.py::test_weights_that_do_not_fit_are_named"),
    "cache-after-swap": _found(
        "scheduler/test_scheduler.py::test_a_new_draft_forgets_the_prefix_cache_and_keeps_the_output"
    ),
    # Text of several tokens at once
    "only-last-token-streamed": _found(
        "app/test_answer.py::test_answer_does_not_depend_on_how_steps_were_cut",
        "app/test_endpoints.py::test_stream_and_whole_answer_hold_the_same_text",
    ),
    "stream-drops-words": _found(
        "app/test_endpoints.py::test_stream_and_whole_answer_hold_the_same_text",
        "test_detokenizer.py::test_deltas_of_all_ways_to_cut_an_answer_are_equal_and_whole",
    ),
    "tail-not-flushed": _found("app/test_answer.py::test_nothing_held_back_is_lost_at_the_end"),
    "tool-delta": _found(
        "app/test_tool_formats.py::test_transcript_gives_its_calls_in_pieces_of_every_size",
        "app/test_tools.py::test_deltas_of_a_call_have_its_id_once_and_its_number_always",
    ),
    "reasoning-boundary": Kind(absent="parsers of reasoning"),
    "utf8-split": _found("test_detokenizer.py::test_joined_deltas_equal_the_text_for_runs_of_any_size"),
    # Operations
    "replica-drain": _found(
        "e2e/test_serve_changes.py::test_a_draft_is_replaced_and_a_replica_killed_under_load"
    ),
    "bench-random-prompts": _found("app/test_bench.py::test_arms_alternate_and_share_their_prompts"),
    "run-variance": _found("app/test_bench.py::test_arms_alternate_and_share_their_prompts"),
    # What clients trip over
    "usage-unasked": _found("app/test_endpoints.py::test_usage_comes_last_and_only_when_asked_for"),
    "finish-reason-missing": _found("app/test_endpoints.py::test_chat_stream_is_exact_to_the_byte"),
    "null-content-refused": _found(
        "app/test_tools.py::test_calls_and_results_of_earlier_turns_are_written_as_the_model_writes_them"
    ),
    "bad-request-retried": _found(
        "app/test_openapi.py::test_body_with_any_value_anywhere_gets_an_answer_or_a_documented_error",
        "app/test_schemathesis.py::test_no_case_fails_the_server_or_breaks_the_document",
    ),
    "forgotten-prefix": _found(
        "app/test_bad_input.py::test_path_with_too_much_or_too_little_is_told_the_right_one"
    ),
    "event-cut-at-line-end": _found("app/test_endpoints.py::test_line_ends_of_unicode_do_not_cut_an_event"),
    "health-while-stalled": _found(
        "test_async_engine.py::test_a_stopped_core_is_unhealthy_until_it_goes_on",
        "app/test_handle_backend.py::test_probe_is_not_kept_waiting_while_ray_looks_for_a_replica",
    ),
    "queue-without-bound": _found("app/test_access.py::test_queue_of_an_engine_that_says_nothing_is_bounded"),
}
