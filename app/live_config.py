"""What may change while a server runs: Serve's `user_config`, checked and laid over the configuration.

Bringing a server there is left to `live`. It is flat, since Serve compares it by its text.
"""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.drafts import NO_DRAFT
from engine import ConfigError

DIGEST = r"^[0-9a-f]{64}$"


class LiveConfig(BaseModel):
    """A key that is left out means what the server was started with.

    `draft` is a folder, the name of one, or "auto", as at the start; `draft_digest` the sha256 that its
    weights must have. Replicas named in `canary_replicas`, with commas between, load the canary's draft
    instead. `speculation` is a mode of `engine.speculation.mode`; "off" turns drafting off.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    draft: str | None = None
    draft_digest: str | None = Field(default=None, pattern=DIGEST)
    canary_draft: str | None = None
    canary_draft_digest: str | None = Field(default=None, pattern=DIGEST)
    canary_replicas: str | None = None
    speculation: str | None = None
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    max_concurrent_calls: int | None = Field(default=None, ge=1)

    @classmethod
    def parse(cls, values: Any) -> Self:
        """Return what Serve hands over. Raises `ConfigError` naming the key."""
        try:
            config = cls.model_validate({} if values is None else values)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            key = ".".join(str(part) for part in first["loc"]) or "user_config"
            text = "unknown key" if first["type"] == "extra_forbidden" else first["msg"]
            raise ConfigError(f"user_config: {key}: {text}") from error
        if NO_DRAFT in (config.draft, config.canary_draft):
            raise ConfigError("user_config: draft: a running draft is turned off by speculation: off")
        for draft, digest in (
            (config.draft, config.draft_digest),
            (config.canary_draft, config.canary_draft_digest),
        ):
            if digest is not None and draft is None:
                raise ConfigError(
                    "user_config: draft_digest: it names the weights of a draft that is not given"
                )
        return config

    def for_replica(self, name: str) -> "LiveConfig":
        """Return what is meant for one replica: the canary's draft as its draft, or no word of a canary."""
        own: dict[str, str | None] = dict.fromkeys(("canary_draft", "canary_draft_digest", "canary_replicas"))
        if self.canary_draft is not None and name in (self.canary_replicas or "").split(","):
            own |= {"draft": self.canary_draft, "draft_digest": self.canary_draft_digest}
        return self.model_copy(update=own)

    def over(self, start: "LiveConfig") -> "LiveConfig":
        """Return this configuration with every key that is left out as at the start."""
        given = {key: value for key, value in self.model_dump().items() if value is not None}
        if "draft" in given:
            given.setdefault("draft_digest", None)
        return start.model_copy(update=given)
