"""Settings: what is accepted, what is refused and in which words, and that no secret is shown."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from router.config import (
    GROUPS,
    BackendUrl,
    Settings,
    SettingsError,
    is_secret,
    load_settings,
    load_settings_and_sources,
    parts,
)

PAIR = {"speculative": "http://127.0.0.1:31000", "baseline": "http://127.0.0.1:30000"}
WHOLE = {**PAIR, "threshold": 32}
# Not in any message, whatever is wrong.
SECRET = "sk-Xq7"


def load(
    environ: dict[str, str] | None = None, config: Path | None = None, **flags: Any
) -> Settings:
    return load_settings({**WHOLE, **flags}, environ=environ or {}, config=config)


def refusal(
    environ: dict[str, str] | None = None, config: Path | None = None, **flags: Any
) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load(environ, config, **flags)
    assert str(caught.value) == "\n".join(caught.value.lines)
    assert SECRET not in str(caught.value)
    return caught.value.lines


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# -- the pair's addresses -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "url", "authority"),
    [
        ("http://host", BackendUrl("http", "host", 80), b"host"),
        ("http://host/", BackendUrl("http", "host", 80), b"host"),
        ("http://host:", BackendUrl("http", "host", 80), b"host"),
        ("http://host/v1", BackendUrl("http", "host", 80), b"host"),
        ("http://host/v1/", BackendUrl("http", "host", 80), b"host"),
        ("HTTP://Host:8080", BackendUrl("http", "host", 8080), b"host:8080"),
        ("https://host", BackendUrl("https", "host", 443), b"host"),
        ("https://host:80", BackendUrl("https", "host", 80), b"host:80"),
        ("http://host/a/b/v1/", BackendUrl("http", "host", 80, "/a/b"), b"host"),
        ("http://host/v1/v1", BackendUrl("http", "host", 80, "/v1"), b"host"),
        ("http://host/av1", BackendUrl("http", "host", 80, "/av1"), b"host"),
        ("http://host/v1/x", BackendUrl("http", "host", 80, "/v1/x"), b"host"),
        ("http://[::1]:30000", BackendUrl("http", "::1", 30000), b"[::1]:30000"),
        ("http://[2001:DB8:0::1]", BackendUrl("http", "2001:db8::1", 80), b"[2001:db8::1]"),
        (
            "http://sglang_base.pod:9",
            BackendUrl("http", "sglang_base.pod", 9),
            b"sglang_base.pod:9",
        ),
    ],
)
def test_url_rule(text: str, url: BackendUrl, authority: bytes) -> None:
    """A trailing slash and then one trailing /v1 are dropped, and what is left is the prefix."""
    assert BackendUrl.parse(text) == url
    assert url.authority == authority


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "space"),
        ("host:80", "not a URL of the form"),
        ("127.0.0.1:80", "not a URL of the form"),
        ("ftp://host", "not a URL of the form"),
        ("http://", "no usable host name"),
        ("http://:80", "no usable host name"),
        ("http://ho st", "space"),
        ("http://host\n", "space"),
        ("http://höst", "non-ASCII"),
        ("http://-host", "no usable host name"),
        ("http://::1:80", "cannot be read"),
        ("http://[::1", "cannot be read"),
        ("http://[fe80::1%25eth0]", "zone"),
        ("http://[host]", "cannot be read"),
        ("http://host:0", "port 0"),
        ("http://host:65536", "cannot be read"),
        ("http://host:x", "cannot be read"),
        ("http://user:sk-Xq7@host", "no user or password"),
        ("http://host?", "no query"),
        ("http://host/#top", "no fragment"),
        ("http://host//", "segment"),
        ("http://host/a//b", "segment"),
        ("http://host/../b", "segment"),
        ("http://host/%2", "segment"),
    ],
)
def test_bad_url(text: str, reason: str) -> None:
    """An address that the relay could misread is refused with the reason."""
    with pytest.raises(ValueError, match=reason):
        BackendUrl.parse(text)
    (line,) = refusal(baseline=text)
    assert line.startswith("baseline = '")
    assert "(flag --baseline): " in line


def test_url_is_text_or_already_parsed() -> None:
    """A backend's URL may be given as the value it becomes, and as nothing else but text."""
    url = BackendUrl("https", "host", 443)
    assert load(baseline=url).baseline is url
    (line,) = refusal(baseline={"host": "x"})
    assert line == "baseline = a table (flag --baseline): not a URL"


@given(
    st.sampled_from(["http", "https"]),
    st.sampled_from(["host", "10.0.0.1", "::1"]),
    st.integers(1, 65535),
    st.sampled_from(["", "/a", "/v1/b", "/a%20b"]),
)
def test_url_is_written_as_it_is_read(scheme: str, host: str, port: int, prefix: str) -> None:
    """A backend's URL reads back as itself, so what is logged can be pasted."""
    shown = f"[{host}]" if ":" in host else host
    url = BackendUrl.parse(f"{scheme}://{shown}:{port}{prefix}")
    assert (url.scheme, url.host, url.port, url.prefix) == (scheme, host, port, prefix)
    assert BackendUrl.parse(str(url)) == url


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("250ms", 0.25),
        ("5s", 5.0),
        ("2m", 120.0),
        ("1h", 3600.0),
        ("7", 7.0),
        (".5", 0.5),
        (3, 3.0),
    ],
)
def test_duration(written: object, seconds: float) -> None:
    """A duration is seconds, or a number with a unit."""
    assert load(dwell=written).dwell == seconds


@pytest.mark.parametrize(
    "written", ["soon", "-1s", "5 days", "", "1e9", math.inf, True, "9999999h"]
)
def test_bad_duration(written: object) -> None:
    """What is no duration, or more than a year, is refused."""
    (line,) = refusal(dwell=written)
    assert line.startswith("dwell = ")


@pytest.mark.parametrize(
    ("written", "size"),
    [("64MiB", 64 << 20), ("8kib", 8192), ("1 GiB", 1 << 30), ("10kB", 10_000), ("7", 7), (7, 7)],
)
def test_size(written: object, size: int) -> None:
    """A size is bytes, or a number with a unit."""
    assert load(max_body=written).max_body == size


@pytest.mark.parametrize("written", ["64M", "0.3B", "", 0, True, "MiB"])
def test_bad_size(written: object) -> None:
    """What is no whole number of bytes is refused."""
    (line,) = refusal(max_body=written)
    assert line.startswith("max_body = ")


@pytest.mark.parametrize(
    ("written", "threshold"),
    [("always", math.inf), ("inf", math.inf), ("never", 0.0), ("32", 32.0), (0, 0.0), (1.5, 1.5)],
)
def test_threshold(written: object, threshold: float) -> None:
    """A threshold is a number from 0 up, or a word for its two ends."""
    assert load(threshold=written).threshold == threshold


@pytest.mark.parametrize("written", [-1, "nan", "many", True, [1], 10**400])
def test_bad_threshold(written: object) -> None:
    """What is no threshold is refused, also where a float could not hold it."""
    (line,) = refusal(threshold=written)
    assert line.endswith("not a number of requests from 0 up, nor always or never")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("band", 1),
        ("band", -0.1),
        ("kv_mark", 0),
        ("retry_budget", 1.1),
        ("port", 65536),
        ("port", True),
        ("backend_keep_alive", 0),
        ("max_in_flight", 0),
        ("policy", "random"),
        ("log_level", "loud"),
        ("host", "http://x"),
        ("host", "[::1]"),
        ("cors_origin", "https://a/b"),
        ("fence_n", "maybe"),
    ],
)
def test_out_of_range(name: str, value: object) -> None:
    """A value outside its range is refused, and the line has key, value and source."""
    flags: dict[str, Any] = {name: value}
    (line,) = refusal(**flags)
    assert line.startswith(f"{name} = ")
    assert f"(flag --{name.replace('_', '-')})" in line


@pytest.mark.parametrize("name", list(Settings.model_fields))
def test_documented(name: str, tmp_path: Path) -> None:
    """Every setting says what it does, and the example it gives is accepted."""
    field = Settings.model_fields[name]
    assert field.description
    text, has_example, example = field.description.partition(" Example: ")
    assert text.endswith(".")
    if field.annotation is bool:
        assert not has_example
        return
    assert example
    value: object = write(tmp_path / example, "key") if Path in parts(name) else example
    flags: dict[str, Any] = {name: value}
    if name == "calibration":
        flags["threshold"] = None
    if name == "admin_host":
        flags["admin_open"] = True
    if name.startswith("ssl_"):
        flags = {"ssl_certfile": value, "ssl_keyfile": value}
    if name in {"port", "admin_port"}:
        assert example != str(field.default)
    assert getattr(load(**flags), name) is not None


# -- sources --------------------------------------------------------------------------------------


def test_precedence(tmp_path: Path) -> None:
    """A flag wins over the environment, that over the file, and that over the default."""
    config = write(tmp_path / "c.toml", "port = 1\nhost = '::1'\nband = 0.5\n")
    environ = {"CROSSOVER_PORT": "2", "CROSSOVER_BAND": "0.4"}
    settings, sources = load_settings_and_sources(
        {**WHOLE, "port": 3}, environ=environ, config=config
    )
    assert (settings.port, settings.band, settings.host) == (3, 0.4, "::1")
    assert sources["port"] == "flag --port"
    assert sources["band"] == "environment CROSSOVER_BAND"
    assert sources["host"] == f"file {config}"
    assert sources["dwell"] == "default"


def test_overruled_value_is_not_looked_at(tmp_path: Path) -> None:
    """A bad value does no harm when a stronger source has a good one."""
    config = write(tmp_path / "c.toml", "port = 'x'\n")
    assert load(config=config, port=3).port == 3


def test_everything_from_the_environment() -> None:
    """Each setting has its variable, and lists are separated by commas."""
    environ = {f"CROSSOVER_{name.upper()}": str(value) for name, value in WHOLE.items()}
    environ |= {"CROSSOVER_API_KEYS": "a, b,", "CROSSOVER_FENCE_N": "true", "PATH": "/bin"}
    settings = load_settings(environ=environ)
    assert str(settings.speculative) == PAIR["speculative"]
    assert settings.threshold == 32.0
    assert settings.fence_n is True
    assert [key.get_secret_value() for key in settings.api_keys] == ["a", "b"]


def test_everything_from_the_file(tmp_path: Path) -> None:
    """The file has the settings by name, with TOML's own types or the same spellings."""
    text = f"""
    speculative = "{PAIR["speculative"]}"
    baseline = "{PAIR["baseline"]}"
    threshold = inf
    dwell = "250ms"
    access_log = false
    cors_origin = ["https://a.example", "http://b:3000"]
    """
    config = write(tmp_path / "c.toml", text)
    settings = load_settings(environ={"CROSSOVER_CONFIG": str(config)})
    assert settings.threshold == math.inf
    assert settings.dwell == 0.25
    assert settings.access_log is False
    assert settings.cors_origin == ("https://a.example", "http://b:3000")


def test_paths_in_the_file_are_beside_it(tmp_path: Path) -> None:
    """A path in the file is relative to the file, wherever the router is started."""
    calibration = write(tmp_path / "cal.json", "{}")
    config = write(tmp_path / "c.toml", "calibration = 'cal.json'\n")
    assert load(config=config, threshold=None).calibration == calibration


def test_given_config_overrules_the_variable(tmp_path: Path) -> None:
    """--config wins over CROSSOVER_CONFIG, as every flag does."""
    config = write(tmp_path / "c.toml", "port = 1\n")
    assert load({"CROSSOVER_CONFIG": "nowhere.toml"}, config).port == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"port = ", "not a TOML file: "), (b"\xff", "not a TOML file: "), (None, "No such file")],
)
def test_bad_file(content: bytes | None, reason: str, tmp_path: Path) -> None:
    """A file that cannot be read is one line, beside other problems; what it may hold is not missed."""
    config = tmp_path / "c.toml"
    if content is not None:
        config.write_bytes(content)
    first, second = refusal({}, config, port="x")
    assert first.startswith(f"config = '{config}' (flag --config): {reason}")
    assert second.startswith("port = 'x' (flag --port): ")
    with pytest.raises(SettingsError) as caught:
        load_settings({}, config=config, environ={})
    assert caught.value.lines == (first,)


def test_unknown_keys(tmp_path: Path) -> None:
    """An unknown key in any source is refused, with the setting that was probably meant."""
    config = write(tmp_path / "c.toml", "queue-timeout = 1\n[limits]\nport = 2\n")
    lines = refusal({"CROSSOVER_TRESHOLD": "3", "CROSSOVER_X": "y"}, config, colour="red")
    assert lines == (
        f"queue-timeout = 1 (file {config}): no such setting; did you mean queue_timeout?",
        f"limits = a table (file {config}): no such setting",
        "treshold = '3' (environment CROSSOVER_TRESHOLD): no such setting; did you mean threshold?",
        "x = 'y' (environment CROSSOVER_X): no such setting",
        "colour = 'red' (flag --colour): no such setting",
    )


def test_variables_that_kubernetes_sets() -> None:
    """A Service called crossover puts CROSSOVER_ variables into every pod, and they are ignored."""
    environ = {
        "CROSSOVER_SERVICE_HOST": "10.0.0.7",
        "CROSSOVER_SERVICE_PORT": "80",
        "CROSSOVER_SERVICE_PORT_HTTP": "80",
        "CROSSOVER_PORT": "tcp://10.0.0.7:80",
        "CROSSOVER_PORT_80_TCP": "tcp://10.0.0.7:80",
        "CROSSOVER_PORT_80_TCP_ADDR": "10.0.0.7",
        "CROSSOVER_ADMIN_SERVICE_HOST": "10.0.0.8",
        "CROSSOVER_ADMIN_PORT": "tcp://10.0.0.8:9400",
    }
    settings = load(environ)
    assert (settings.port, settings.admin_port) == (8000, 9400)


# -- everything at once, and together -------------------------------------------------------------


def test_all_problems_at_once() -> None:
    """One report has every problem: unknown, missing, bad, and bad together."""
    with pytest.raises(SettingsError) as caught:
        load_settings(
            {"baseline": "nowhere", "dwell": "soon", "admin_host": "0.0.0.0", "workers": 2},
            environ={"CROSSOVER_QUEUE": "1"},
        )
    starts = [line.partition(":")[0] for line in caught.value.lines]
    assert starts == [
        "queue = '1' (environment CROSSOVER_QUEUE)",
        "speculative (not set)",
        "baseline = 'nowhere' (flag --baseline)",
        "dwell = 'soon' (flag --dwell)",
        "threshold (not set), calibration (not set)",
        "admin_host = '0.0.0.0' (flag --admin-host), admin_key (not set)",
        "workers = 2 (flag --workers)",
    ]
    assert "give --speculative URL, CROSSOVER_SPECULATIVE or" in caught.value.lines[1]


def test_neither_threshold_nor_calibration() -> None:
    """Without a line the refusal says how to get one."""
    (line,) = refusal(threshold=None)
    assert "--calibration FILE, which loadtest calibrate measures" in line
    assert "sglang.bench_serving --max-concurrency" in line
    assert "--threshold K" in line


@pytest.mark.parametrize("policy", ["speculative", "baseline", "least-in-flight", "round-robin"])
def test_other_policies_need_no_line(policy: str) -> None:
    """Only the frontier needs a threshold or a calibration."""
    assert load(threshold=None, policy=policy).policy == policy


def test_both_threshold_and_calibration(tmp_path: Path) -> None:
    """Two lines are refused, and the report says where each came from."""
    calibration = write(tmp_path / "c.json", "{}")
    (line,) = refusal({"CROSSOVER_CALIBRATION": str(calibration)})
    assert line == (
        f"threshold = 32 (flag --threshold), calibration = '{calibration}' "
        "(environment CROSSOVER_CALIBRATION): give one of them, not both"
    )


@pytest.mark.parametrize(
    "pair",
    [
        {"speculative": "http://a:1", "baseline": "http://a:1/v1/"},
        {"speculative": "http://localhost:1", "baseline": "http://127.0.0.1:1"},
        {"speculative": "http://[::1]:1", "baseline": "http://localhost:1"},
    ],
)
def test_the_pair_is_two_servers(pair: dict[str, Any]) -> None:
    """One server under two spellings is no pair."""
    (line,) = refusal(**pair)
    assert line.endswith("they are the same server")


@pytest.mark.parametrize(
    "pair",
    [
        {"speculative": "http://a:1/x", "baseline": "http://a:1/y"},
        {"speculative": "http://127.0.0.1:1", "baseline": "http://127.0.0.2:1"},
    ],
)
def test_two_servers_may_look_alike(pair: dict[str, Any]) -> None:
    """A prefix or another loopback address makes two servers."""
    assert load(**pair).speculative != load(**pair).baseline


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ({"baseline": "http://127.0.0.1:8000"}, "port"),
        ({"baseline": "http://localhost:9400"}, "admin_port"),
        ({"baseline": "http://127.0.0.5:8000", "host": "0.0.0.0"}, "port"),
    ],
)
def test_no_loop(flags: dict[str, Any], key: str) -> None:
    """A backend that is this router would relay to itself for ever, so it is refused."""
    (line,) = refusal(**flags)
    assert f"{key} = " in line
    assert line.endswith("the backend would be this router itself")


@pytest.mark.parametrize(
    ("hosts", "good"),
    [
        (("127.0.0.1", "127.0.0.1"), False),
        (("0.0.0.0", "127.0.0.1"), False),
        (("localhost", "127.0.0.1"), False),
        (("10.0.0.1", "127.0.0.1"), True),
    ],
)
def test_two_listeners_one_port(hosts: tuple[str, str], good: bool) -> None:
    """The two listeners may share a port only where they share no address."""
    flags: dict[str, Any] = {
        "host": hosts[0],
        "admin_host": hosts[1],
        "port": 7000,
        "admin_port": 7000,
    }
    if good:
        assert load(**flags).port == 7000
    else:
        (line,) = refusal(**flags)
        assert line.endswith("the two listeners need two ports")


def test_any_free_port_twice() -> None:
    """Port 0 is any free port, so both may have it."""
    assert load(port=0, admin_port=0).admin_port == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "router.example"])
def test_admin_off_loopback(host: str) -> None:
    """The admin listener is not opened to other machines without a key or a word."""
    (line,) = refusal(admin_host=host)
    assert "set admin_key, or admin_open" in line
    assert load(admin_host=host, admin_key=SECRET).admin_host == host
    assert load(admin_host=host, admin_open=True).admin_host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_admin_on_loopback(host: str) -> None:
    """On loopback no key is asked for."""
    assert load(admin_host=host).admin_key is None


def test_workers() -> None:
    """More than one worker is refused with the reason, also when a host's habit asks for it."""
    (flag,) = refusal(workers=4)
    (variable,) = refusal({"WEB_CONCURRENCY": "4"})
    assert "each of N workers would see 1/N of the load" in flag
    assert variable.startswith("WEB_CONCURRENCY = '4' (environment): ")
    assert variable.partition("): ")[2] == flag.partition("): ")[2]
    assert load({"WEB_CONCURRENCY": "1"}, workers="1").workers == 1


def test_tls_needs_both(tmp_path: Path) -> None:
    """A certificate without its key, a file that is not there, or a directory is refused."""
    certificate = write(tmp_path / "cert.pem", "x")
    (line,) = refusal(ssl_certfile=certificate)
    assert line.endswith("TLS needs both of them")
    (line,) = refusal(ssl_certfile=certificate, ssl_keyfile=tmp_path / "no.pem")
    assert line.endswith("no such file")
    (line,) = refusal(ssl_certfile=certificate, ssl_keyfile=tmp_path)
    assert line.endswith("a directory, not a file")


@pytest.mark.parametrize(
    "flags",
    [
        {"max_body": "2GiB"},
        {"telemetry_interval": 2},
        {"breaker_open": 61},
        {"replay_window": 900},
    ],
)
def test_amounts_together(flags: dict[str, Any]) -> None:
    """An amount that would make another one meaningless is refused, with both in the line."""
    (line,) = refusal(**flags)
    assert line.count(" = ") == 2
    assert "(default)" in line


# -- secrets --------------------------------------------------------------------------------------


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    """No key is in the report, wherever and however wrongly it was written."""
    config = write(tmp_path / "c.toml", f"apikeys = ['{SECRET}']\n[admin]\nkey = '{SECRET}'\n")
    environ = {
        "CROSSOVER_ADMIN_KEY": f"{SECRET} x",
        "CROSSOVER_AUTH": SECRET,
        "CROSSOVER_API_KEYS": f"ok,{SECRET} y",
        "CROSSOVER_SPECULATIVE": f"http://u:{SECRET}/@h/",
    }
    lines = refusal(
        environ,
        config,
        speculative=None,
        baseline=f"http://host/?key={SECRET}",
        backend_api_key=[SECRET],
    )
    assert len(lines) == 8
    assert "speculative = 'http://***@h/' (environment CROSSOVER_SPECULATIVE)" in str(lines)
    assert "api_keys = *** (environment CROSSOVER_API_KEYS): item 2: " in str(lines)


def test_secrets_are_not_dumped(tmp_path: Path) -> None:
    """Neither repr nor the redacted form holds a key, and the latter is JSON."""
    keys = write(tmp_path / "keys.txt", "k")
    settings = load(
        admin_key=SECRET, api_keys=[SECRET, SECRET], api_keys_file=keys, threshold="always"
    )
    redacted = settings.redacted()
    assert SECRET not in repr(settings)
    assert SECRET not in json.dumps(redacted, allow_nan=False)
    assert list(redacted) == [name for group in GROUPS for name in group.model_fields]
    assert redacted["admin_key"] == "***"
    assert redacted["api_keys"] == ["***", "***"]
    assert redacted["api_keys_file"] == str(keys)
    assert redacted["backend_api_key"] is None
    assert redacted["baseline"] == PAIR["baseline"]
    assert redacted["threshold"] == "always"
    assert redacted["max_body"] == 64 << 20


def test_which_settings_are_secret() -> None:
    """What holds a key is known by its type, so that a new one cannot be forgotten."""
    secret = {name for name in Settings.model_fields if is_secret(name)}
    assert secret == {
        "admin_key",
        "api_keys",
        "backend_api_key",
        "speculative_api_key",
        "baseline_api_key",
    }


def test_client_keys_from_both_places(tmp_path: Path) -> None:
    """Keys come from the setting and from the file, which may have comments and empty lines."""
    keys = write(tmp_path / "keys.txt", "# ours\n\n  two \nthree,with,commas\n")
    settings = load(api_keys="one", api_keys_file=keys)
    values = [key.get_secret_value() for key in settings.client_keys()]
    assert values == ["one", "two", "three,with,commas"]
    assert load().client_keys() == ()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no key in it, which would let everyone in"),
        (b"# none\n", "no key in it, which would let everyone in"),
        (b"ok\nsk-Xq7 x\n", "line 2: a key is not empty and has only visible ASCII characters"),
        (b"\xff\n", "not a text file"),
    ],
)
def test_bad_key_file(
    content: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key file that would lock everyone out or in is refused by line, not by content."""
    monkeypatch.chdir(tmp_path)  # a long path would be cut short in the message
    path = Path("keys.txt")
    path.write_bytes(content)
    (line,) = refusal(api_keys_file=path)
    assert line == f"api_keys_file = '{path}' (flag --api-keys-file): {reason}"


@pytest.mark.parametrize("value", ["", " , "])
def test_empty_keys_do_not_open_the_door(value: str) -> None:
    """A variable that was to hold the keys and is empty is refused, not taken for no auth."""
    (line,) = refusal({"CROSSOVER_API_KEYS": value})
    assert line.startswith("api_keys = *** (environment CROSSOVER_API_KEYS): empty")


def test_backend_key() -> None:
    """A backend's own key wins over the common one."""
    settings = load(backend_api_key="both", speculative_api_key="one")
    assert settings.backend_key("speculative") == SecretStr("one")
    assert settings.backend_key("baseline") == SecretStr("both")
    assert load().backend_key("baseline") is None


# -- the value itself -----------------------------------------------------------------------------


def test_frozen() -> None:
    """Settings do not change once they are made."""
    settings = load()
    with pytest.raises(ValidationError, match="frozen"):
        settings.port = 1
    assert hash(settings) == hash(load())


def test_made_directly_it_is_checked_too() -> None:
    """There is no way around the checks, and pydantic's own error repeats no value."""
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({**WHOLE, "admin_key": f"{SECRET} x"})
    assert SECRET not in str(caught.value)
    with pytest.raises(ValidationError, match="threshold, calibration: frontier needs one"):
        Settings.model_validate(PAIR)


def test_defaults_are_good() -> None:
    """The two addresses and a threshold are enough, and the defaults are those documented."""
    settings = load()
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert (settings.admin_host, settings.admin_port) == ("127.0.0.1", 9400)
    assert (settings.policy, settings.scope) == ("frontier", "total")
    assert (settings.band, settings.dwell) == (0.2, 5.0)
    assert (settings.max_in_flight, settings.queue_size, settings.queue_timeout) == (2048, 1024, 10)
    assert Settings.model_validate(settings.model_dump()) == settings
