"""The Serve configuration of a Ray cluster at hand, through the REST interface of its dashboard.

On Kubernetes it is changed in the RayService instead, which would not know of a change made here.
"""

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from ops.rollout.serve_target import ServeConfig
from ops.rollout.state import RolloutError

APPLICATIONS = "/api/serve/applications/"
TIMEOUT_S = 30.0


def fetch(url: str, token: str | None = None, body: bytes | None = None) -> str:
    """GET `url`, or PUT `body` there. Raises `RolloutError` for what is not answered with 200."""
    if not url.startswith(("http://", "https://")):
        raise RolloutError(f"expected a URL of http or https, found {url}")
    headers = {"content-type": "application/json"} if body is not None else {}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    method = "GET" if body is None else "PUT"
    try:
        request = urllib.request.Request(url, body, headers, method=method)  # noqa: S310 - scheme checked
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310 - as above
            text: str = answer.read().decode("utf-8", "replace")
            return text
    except urllib.error.HTTPError as error:
        detail = " ".join(error.read().decode("utf-8", "replace").split())[:300]
        raise RolloutError(f"{url} answered {error.code}: {detail}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise RolloutError(f"cannot reach {url}: {error}") from error


class Dashboard:
    """See `ConfigSource`. The interface has no versions: one process at a time may change it."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self._url, self._token = url.rstrip("/") + APPLICATIONS, token

    def read(self) -> ServeConfig:
        try:
            details = json.loads(fetch(self._url, self._token))
            applications = [found["deployed_app_config"] for found in details["applications"].values()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RolloutError(f"{self._url} is no dashboard of Ray: {error!r}") from error
        if None in applications:
            raise RolloutError(
                "an application was deployed by a program, so it has no configuration to change: "
                "deploy it with serve run or serve deploy"
            )
        values: dict[str, Any] = {
            key: details[key] for key in ("proxy_location", "http_options") if details.get(key) is not None
        }
        return ServeConfig(values | {"applications": applications}, "")

    def write(self, config: ServeConfig) -> bool:
        fetch(self._url, self._token, json.dumps(config.values).encode())
        return True
