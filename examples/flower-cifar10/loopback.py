"""A whole federation on this machine: SuperLink and three SuperNodes on loopback, with TLS and node authentication.

    python loopback.py                                  # makes certificates and keys, starts, runs the app, stops everything
    python loopback.py --insecure --run-config "rounds=2 examples=100"

What it does is what an operator does on real machines; docs/flower.md says which line runs where.
"""

import argparse
import contextlib
import datetime
import ipaddress
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

APP = Path(__file__).parent
BIN = Path(sys.executable).parent
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def make_certificates(folder: Path, host: str = "127.0.0.1") -> None:
    """ca.pem, server.pem and server.key: an authority of our own, and a certificate for `host` signed by it."""
    now = datetime.datetime.now(datetime.UTC)

    def name(common: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])

    def builder(subject: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name("federation authority"))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=30))
        )

    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca = builder("federation authority", authority.public_key()).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    ca = ca.add_extension(usage, critical=True)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(host))])
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    own = builder(host, server.public_key()).add_extension(names, critical=False)
    own = own.add_extension(identifier, critical=False)
    _write(folder / "ca.pem", ca.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    _write(folder / "server.pem", own.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    _write(folder / "server.key", _private(server, serialization.PrivateFormat.TraditionalOpenSSL))


def make_node_key(folder: Path, name: str) -> None:
    """NAME.key stays on the node; NAME.pub is what the operator registers."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(folder / f"{name}.key", _private(key, serialization.PrivateFormat.OpenSSH))
    _write(folder / f"{name}.pub", public + b"\n")


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write(path: Path, data: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(data)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Federation:
    """SuperLink and SuperNodes as processes of this one; `folder` has their keys, logs and Flower's home."""

    def __init__(self, folder: Path, secure: bool = True):
        self.folder, self.secure = folder, secure
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        home = folder / "home"
        home.mkdir(exist_ok=True)
        path = os.pathsep.join([str(BIN), os.environ.get("PATH", "")])  # Flower starts its own programs by name
        self.environment = {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path}
        how = f'root-certificates = "{folder / "ca.pem"}"' if secure else "insecure = true"
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "loopback"\n\n[superlink.loopback]\naddress = "127.0.0.1:{self.port}"\n{how}\n'
        )
        if secure:
            make_certificates(folder)

    def start(self, name: str, *command: str, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**self.environment, **(environment or {})},
                start_new_session=True,
            )
        return process

    def superlink(self, *options: str) -> None:
        how = ["--insecure"]
        if self.secure:
            how = ["--ssl-ca-certfile", str(self.folder / "ca.pem"), "--ssl-certfile", str(self.folder / "server.pem")]
            how += ["--ssl-keyfile", str(self.folder / "server.key"), "--enable-supernode-auth"]
        where = ["--host", "127.0.0.1", "--port", str(self.port)]
        process = self.start("superlink", "flower-superlink", *how, *where, *options)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.2)
        raise RuntimeError(f"the SuperLink did not start: see {self.folder / 'superlink.log'}")

    def register(self, name: str) -> None:
        """Let the node with this key in."""
        make_node_key(self.folder, name)
        self.flwr("supernode", "register", str(self.folder / f"{name}.pub"), "loopback")

    def supernode(
        self, client: int, of: int, name: str | None = None, port: int | None = None, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start a SuperNode; `port` is where it finds the SuperLink, if not at its own."""
        name = name or f"node-{client}"
        how = ["--insecure"]
        if self.secure:
            how = ["--root-certificates", str(self.folder / "ca.pem")]
            how += ["--auth-supernode-private-key", str(self.folder / f"{name}.key")]
        return self.start(
            name, "flower-supernode", *how, "--superlink", f"127.0.0.1:{port or self.port}", "--port", str(free_port()),
            "--node-config", f"partition-id={client} num-partitions={of}",
            environment={"FEDBCGD_STATE": str(self.folder / f"state-{client}"), **environment},
        )  # fmt: skip

    def flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(BIN / "flwr"), *arguments], capture_output=True, text=True, env=self.environment, cwd=APP, timeout=120
        )
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def run(self, app: Path, run_config: str) -> subprocess.Popen[bytes]:
        """`flwr run`, its log shown here as it comes."""
        options = ["--run-config", run_config] if run_config else []
        return subprocess.Popen(
            [str(BIN / "flwr"), "run", str(app), "loopback", "--stream", *options], env=self.environment
        )

    def completed(self) -> bool:
        """Whether the last run did what it was to do; `flwr run --stream` itself does not tell."""
        runs = json.loads(self.flwr("list", "loopback", "--format", "json"))["runs"]
        return bool(runs) and runs[0]["status"].startswith("finished:completed")

    def stop(self) -> None:
        for process in reversed(self.processes.values()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 15
        for process in self.processes.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextlib.contextmanager
def federation(folder: Path, nodes: int, secure: bool) -> Iterator[Federation]:
    running = Federation(folder, secure)
    try:
        running.superlink()
        for client in range(nodes):
            if secure:
                running.register(f"node-{client}")
            running.supernode(client, nodes)
        yield running
    finally:
        running.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--insecure", action="store_true", help="without TLS and node authentication")
    parser.add_argument("--run-config", default="", help='values of [tool.flwr.app.config], such as "rounds=2"')
    parser.add_argument("--folder", type=Path, help="keys and logs go here and stay; default: a temporary one")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        running = stack.enter_context(federation(folder.resolve(), given.nodes, not given.insecure))
        print(f"SuperLink on 127.0.0.1:{running.port}, {given.nodes} SuperNodes, logs in {folder}", flush=True)
        said = given.run_config
        ours = [f"{key}={given.nodes}" for key in ("clients", "min-clients") if not re.search(rf"(^|\s){key}=", said)]
        running.run(APP, " ".join([*ours, said]).strip()).wait()
        return 0 if running.completed() else 1


if __name__ == "__main__":
    sys.exit(main())
