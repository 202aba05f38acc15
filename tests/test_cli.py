"""The command `crossover`: its flags, its words and its exit codes."""

import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.__main__ import main as loadtest_main
from router import __version__
from router.__main__ import app
from router.config import Settings, load_settings_and_sources

PAIR = ["--speculative", "http://127.0.0.1:31000", "--baseline", "http://127.0.0.1:30000"]


@pytest.fixture(autouse=True)
def _no_outer_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {"PATH": "/usr/bin:/bin", "COLUMNS": "200", "TERM": "dumb"})


class FakeApp(types.ModuleType):
    """Stands in for `router.app`: notes the settings, returns or raises what the test says."""

    def __init__(self, result: int | Exception) -> None:
        super().__init__("router.app")
        self.result = result
        self.served: list[Settings] = []

    def serve(self, settings: Settings) -> int:
        self.served.append(settings)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def fake_app(monkeypatch: pytest.MonkeyPatch, result: int | Exception) -> FakeApp:
    fake = FakeApp(result)
    monkeypatch.setitem(sys.modules, "router.app", fake)
    return fake


def test_both_commands_say_their_help_without_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing asked is answered with the help alone, and exit code 2."""
    result = CliRunner().invoke(app, [])
    assert (result.exit_code, result.stdout.split()[:2]) == (2, ["Usage:", "crossover"])
    assert loadtest_main([]) == 2
    said = capsys.readouterr()
    assert (said.out.split()[:2], said.err) == (["Usage:", "loadtest"], "")


@pytest.mark.parametrize("asked", ["version", "--version"])
def test_the_version(asked: str) -> None:
    """The version is a command, and a flag for those who try that first."""
    result = CliRunner().invoke(app, [asked])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"crossover {__version__} (Python 3.")


@pytest.mark.parametrize("code", [0, 3])
def test_serve(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Serve hands the settings to the router and exits with the code that it returns."""
    fake = fake_app(monkeypatch, code)
    result = CliRunner().invoke(app, ["serve", *PAIR, "--threshold", "32", "--no-access-log"])
    assert result.exit_code == code
    (settings,) = fake.served
    assert settings.threshold == 32.0
    assert settings.access_log is False
    assert str(settings.baseline) == "http://127.0.0.1:30000"


def test_serve_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nothing expected is printed and has its own exit code."""
    fake_app(monkeypatch, RuntimeError("the cause"))
    result = CliRunner().invoke(app, ["serve", *PAIR, "--threshold", "32"])
    assert result.exit_code == 4
    assert "RuntimeError: the cause" in result.stderr


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused configuration is reported on stderr, all of it, and nothing is started."""
    fake = fake_app(monkeypatch, 0)
    result = CliRunner().invoke(app, ["serve", *PAIR, "--threshold", "-1", "--port", "x"])
    assert result.exit_code == 2
    assert result.stdout == ""
    first, *lines = result.stderr.splitlines()
    assert first == "crossover: the configuration is refused:"
    assert lines[0].startswith("  threshold = '-1' (flag --threshold): ")
    assert lines[1].startswith("  port = 'x' (flag --port): ")
    assert len(lines) == 2
    assert fake.served == []


def test_unknown_flag() -> None:
    """An unknown flag is refused with the code of a refused configuration."""
    result = CliRunner().invoke(app, ["serve", "--treshold", "3"])
    assert result.exit_code == 2
    assert "--treshold" in result.stderr


def test_every_setting_is_a_flag() -> None:
    """The help of serve names every setting, under the title of its group."""
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "160"})
    assert result.exit_code == 0
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in result.stdout
    for title in ("Backends", "Decision", "Listeners", "Limits", "Timeouts and retries", "Log"):
        assert f" {title} " in result.stdout
    assert "64MiB." in result.stdout
    assert "CROSSOVER_THRESHOLD=32" in result.stdout


def test_flags_overrule(tmp_path: Path) -> None:
    """A repeated flag adds to a list, and a --no- flag overrules what the file switched on."""
    config = tmp_path / "c.toml"
    config.write_text("fence_n = true\nfence_logprobs = true\nallow_pinning = false\n")
    flags = [*PAIR, "--threshold", "never", "--config", str(config), "--no-fence-n"]
    flags += ["--allow-pinning", "--cors-origin", "http://a,http://b", "--cors-origin", "http://c"]
    result = CliRunner().invoke(app, ["config", *flags])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert "fence_n = false  # flag --no-fence-n" not in lines
    assert "fence_n = false  # flag --fence-n" in lines
    assert f"fence_logprobs = true  # file {config}" in lines
    assert "allow_pinning = true  # flag --allow-pinning" in lines
    assert 'cors_origin = ["http://a", "http://b", "http://c"]  # flag --cors-origin' in lines


def test_config_can_be_read_back(tmp_path: Path) -> None:
    """What config prints is a file that means the same, without the secrets."""
    flags = [*PAIR, "--threshold", "always", "--dwell", "250ms", "--admin-key", "sk-Xq7"]
    result = CliRunner().invoke(app, ["config", *flags])
    assert result.exit_code == 0
    assert "sk-Xq7" not in result.stdout
    assert '# admin_key = "***"  # flag --admin-key' in result.stdout.splitlines()
    config = tmp_path / "c.toml"
    config.write_text(result.stdout)
    settings, sources = load_settings_and_sources(config=config, environ={})
    assert settings.threshold == float("inf")
    assert settings.dwell == 0.25
    assert sources["dwell"] == f"file {config}"


def test_config_refused() -> None:
    """Config reports what serve would refuse, with the same code."""
    result = CliRunner().invoke(app, ["config"])
    assert result.exit_code == 2
    assert "  speculative (not set): required: give --speculative URL" in result.stderr


def test_reference() -> None:
    """The reference has a row for every setting, with the default as one would write it."""
    result = CliRunner().invoke(app, ["settings"])
    assert result.exit_code == 0
    rows = [line for line in result.stdout.splitlines() if line.startswith("| `")]
    assert len(rows) == len(Settings.model_fields)
    for start in (
        "| `speculative` | URL | required | ",
        "| `policy` | frontier speculative baseline least-in-flight round-robin | frontier | ",
        "| `threshold` | NUMBER | none | ",
        "| `max_header_bytes` | BYTES | 32KiB | ",
        "| `max_buffered` | BYTES | 1GiB | ",
        "| `peek_timeout` | SECONDS | 0.05s | ",
        "| `fence_prompt_bytes` | BYTES | none | ",
        "| `access_log` | true false | true | ",
        "| `api_keys` | KEY | none | ",
        "| `cors_origin` | TEXT | none | ",
        "| `ssl_keyfile` | FILE | none | ",
    ):
        assert any(row.startswith(start) for row in rows), start
