"""The names of spans, events and attributes: all of them stand here.

Those of `gen_ai` follow OpenTelemetry's conventions, which are still in development and whose constants move
between packages; ours begin with `eyas`. Which value goes where is left to `request_spans` and its callers.
"""

PROVIDER = "eyas"

# Children of the span of a request, one of each per choice.
QUEUE = "queue"
PREFILL = "prefill"
DECODE = "decode"

FIRST_TOKEN = "first_token"  # noqa: S105 - an event, not a secret

OPERATION = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_STREAM = "gen_ai.request.stream"
REQUEST_CHOICES = "gen_ai.request.choice.count"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ENDS = "gen_ai.response.finish_reasons"
RESPONSE_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"

OUTCOME = "eyas.outcome"  # as the label of eyas_calls_total
CHOICE = "eyas.choice"
SPECULATION = "eyas.speculation"  # what the request asked for
CALLS = "eyas.speculation.calls"  # verification calls
DRAFTED = "eyas.speculation.draft_tokens"
ACCEPTED = "eyas.speculation.accepted_tokens"
ACCEPTANCE_LENGTH = "eyas.speculation.acceptance_length"  # tokens per call: the token of the call counts
DRAFT_DIGEST = "eyas.draft.digest"
