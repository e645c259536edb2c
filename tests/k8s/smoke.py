"""What the Job of the overlay `smoke` does, as a process of this machine.

What it is asked of is left to the tests.
"""

import subprocess
import sys

from tests.k8s.rendered import K8S


def smoke(url: str, key: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(K8S / "overlays/smoke/smoke.py")],
        env={"EYAS_URL": url, "EYAS_API_KEY": key},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
