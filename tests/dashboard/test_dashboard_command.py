"""`freshet dashboard` as a process: over TLS, with past runs, until it is ended; and what it refuses."""

from __future__ import annotations

import datetime
import ipaddress
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from command_line import freshet_here
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pace import patient
from serving import made_runs

from dashboard.service.access import Role, open_tokens
from orchestrator.cli.exit_codes import USER_ERROR


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    certificate, secret = folder / "cert.pem", folder / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate, secret


def test_over_tls_until_it_is_ended(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    command = [sys.executable, "-m", "orchestrator", "dashboard", "--port", "0"]
    command += ["--runs", str(made_runs(tmp_path / "runs"))]
    command += ["--token-file", str(tmp_path / "t.json"), "--audit-log", str(tmp_path / "a.jsonl")]
    service = subprocess.Popen(
        [*command, "--tls-cert", str(certificate), "--tls-key", str(key)], stdout=subprocess.PIPE, text=True
    )
    assert service.stdout is not None
    address = service.stdout.readline().split()[1]
    try:
        assert address.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(base_url=address, verify=trusted, trust_env=False, timeout=patient(30)) as client:
            token = open_tokens(tmp_path / "t.json")[Role.READ]
            answer = client.post("/login", data={"token": token})
            assert answer.status_code == 303
            assert "Secure" in answer.headers["set-cookie"]
            runs = client.get("/api/v1/runs").json()["runs"]
            assert [run["run"] for run in runs] == ["frozen", "gpt", "half"]
            assert "cannot be read" in runs[-1]["problem"]
        with pytest.raises(httpx.ConnectError):
            httpx.get(address, trust_env=False)
    finally:
        service.send_signal(signal.SIGTERM)
        assert service.wait(20) == 0


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("--host-name", "freshet-service", "--host-name", "10.0.0.7"), "freshet-service"),
        ((), "127.0.0.1"),
    ],
)
def test_on_every_address_it_names_one_that_it_answers_to(
    tmp_path: Path, words: tuple[str, ...], name: str
) -> None:
    command = [sys.executable, "-m", "orchestrator", "dashboard", "--port", "0", "--host", "0.0.0.0", *words]
    command += ["--runs", str(tmp_path)]
    command += ["--token-file", str(tmp_path / "t.json"), "--audit-log", str(tmp_path / "a.jsonl")]
    service = subprocess.Popen(
        [*command, "--until-input-ends"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert service.stdin is not None
    assert service.stdout is not None
    try:
        address = urlsplit(service.stdout.readline().split()[1])
        assert address.hostname == name
        url = f"http://127.0.0.1:{address.port}/healthz"
        answer = httpx.get(url, headers={"Host": address.netloc}, trust_env=False, timeout=patient(30))
        assert answer.status_code == 200
    finally:
        service.stdin.close()
        said = service.stdout.read()
    assert service.wait(20) == 0
    assert "without TLS" in said
    assert ("answers only to requests for this machine's loopback" in said) is (not words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tls-cert", "c.pem"), "TLS needs both --tls-cert and --tls-key"),
        (("--host", "192.0.2.1"), "cannot listen on 192.0.2.1"),
        (("--address", "127.0.0.1:9"), "cluster.address = '127.0.0.1:9': no Ray cluster answers there"),
        (("--token-file", "/proc/none/t.json"), "cannot make the token file /proc/none/t.json"),
    ],
)
def test_what_it_refuses(
    tmp_path: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--runs", str(tmp_path), "--port", "0", "--token-file", str(tmp_path / "t.json")]
    assert freshet_here("dashboard", *arguments, *words) == USER_ERROR
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ["--runs", str(tmp_path), "--token-file", str(tmp_path / "t.json"), "--port", port]
        assert freshet_here("dashboard", *arguments) == USER_ERROR
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
