"""The admin listener against its own OpenAPI document, by schemathesis.

Run as a command, so that its pytest plugin is not needed: every operation with valid, boundary and
broken parameters, bodies and methods, with the key, without it and with a wrong one. All of its
checks are on: statuses, bodies and content types as declared, no 5xx, bad input refused, good input
accepted, the key never ignored, an Allow with every 405.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.process import router_process

KEY = "sk-operator"
CONFIG = f"""
[auth.openapi.HTTPBearer]
bearer = "{KEY}"

# A schema cannot say that a threshold goes with one policy only: such a change is a 400.
[[operations]]
include-path = "/policy"
checks.positive_data_acceptance.expected-statuses = ["2xx", "400"]
"""


@pytest.mark.slow
def test_the_admin_listener_does_what_its_openapi_document_says(tmp_path: Path) -> None:
    """No request that schemathesis makes up gets an answer that the document does not promise."""
    with router_process("http://127.0.0.1:1", "http://127.0.0.1:2", "--admin-key", KEY) as router:
        document = httpx.get(
            router.admin_url + "/openapi.json",
            headers={"authorization": f"Bearer {KEY}"},
            trust_env=False,
        )
        (tmp_path / "openapi.json").write_bytes(document.content)
        (tmp_path / "config.toml").write_text(CONFIG, encoding="utf-8")
        found = subprocess.run(
            [
                sys.executable, "-W", "error", "-m", "schemathesis.cli",
                "--config-file", "config.toml", "run", "openapi.json", "--url", router.admin_url,
                "--max-examples", "5", "--generation-deterministic", "--no-color",
                "--phases", "coverage,fuzzing",
            ],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert found.returncode == 0, found.stdout + found.stderr
        assert "7 selected / 7 total" in found.stdout
        for line in router.log.splitlines():
            assert json.loads(line)["level"] in {"info", "warning"}
