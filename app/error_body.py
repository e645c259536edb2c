"""The error body of the OpenAI API. Which words it holds is left to `errors` and `proxy`."""

import json


def error_body(message: str, kind: str, parameter: str | None = None, code: str | None = None) -> bytes:
    """Return the JSON of one error; `kind` is OpenAI's `type`."""
    error = {"message": message, "type": kind, "param": parameter, "code": code}
    return json.dumps({"error": error}, separators=(",", ":")).encode()
