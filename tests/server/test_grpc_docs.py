"""docs/grpc.md lists the services as they are, and its configuration is one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from hang_guard import HANG_SECONDS
from v1_schema import services

from aengine.server.config.options import ServerConfig

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "grpc.md").read_text(encoding="utf-8")


def test_the_table_of_services_is_the_schema() -> None:
    rows = re.findall(r"^\| `(\w+Service)` \| (.*) \|$", DOCS, re.MULTILINE)
    documented = {name: set(re.findall(r"`(\w+)`", methods)) for name, methods in rows}
    assert documented == {service.name: {method.name for method in service.methods} for service in services()}


def test_the_configuration_passes_the_check(tmp_path: Path) -> None:
    text = DOCS.partition("```toml\n")[2].partition("```")[0]
    config = tmp_path / "aengine.toml"
    config.write_text(re.sub(r"(?m)^(tls_|token_file|host).*\n", "", text))  # those name files that are not here
    command = (sys.executable, "-m", "aengine.server.cli", "--check", "--config", str(config))
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "metrics_port = 9400" in done.stdout


def test_the_table_of_limits_has_the_defaults() -> None:
    units = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}
    rows = re.findall(r"^\| [^|]* \| `(\w+)` \((\d+) ?(\w*)\) \|", DOCS, re.MULTILINE)
    assert len(rows) == 5
    for name, number, unit in rows:
        assert getattr(ServerConfig(), name) == int(number) * units[unit], name
