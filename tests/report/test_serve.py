"""The page's server against clients that are slow, many, or talk nonsense: real sockets on loopback."""

import socket
import threading

import pytest

from fedbcgd.report import serve
from tests.report.runfolders import make
from tests.report.serving import serving


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "REQUEST_SECONDS", 0.4)
    monkeypatch.setattr(serve, "MAX_CONNECTIONS", 3)
    make(tmp_path / "runs" / "a")
    with serving(tmp_path / "runs") as server:
        yield server


def connect(server):
    return socket.create_connection(server.server_address, timeout=20)


def whole(connection):
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def request(server, path="/data.json", more=b""):
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_address[1]}\r\n".encode() + more + b"\r\n"


def test_a_request_that_never_ends_is_given_up_however_steadily_it_comes(server):
    with connect(server) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nX: ")
        ended = threading.Event()

        def drip():
            while not ended.wait(0.05):
                try:
                    slow.sendall(b"x")
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            assert slow.recv(1 << 16).startswith(b"HTTP/1.0 408 ")
        except ConnectionResetError:
            pass  # it was closed while a drop was on its way
        finally:
            ended.set()
            dripping.join()


def test_one_connection_too_many_is_told_so_and_the_others_get_their_answers(server, monkeypatch):
    monkeypatch.setattr(serve, "REQUEST_SECONDS", 60.0)
    idle = [connect(server) for _ in range(3)]
    with connect(server) as surplus:
        assert whole(surplus).startswith(b"HTTP/1.0 503 Service Unavailable\r\n")
    for connection in idle:
        connection.sendall(request(server))
        assert whole(connection).startswith(b"HTTP/1.0 200 OK\r\n")
        connection.close()
    for _ in range(10):  # every place is given back
        with connect(server) as later:
            later.sendall(request(server))
            if whole(later).startswith(b"HTTP/1.0 200 OK\r\n"):
                break
    else:
        pytest.fail("no place was given back")


def test_places_of_those_who_hang_or_go_are_given_back(server):
    for _ in range(4):
        hanging = [connect(server) for _ in range(3)]
        hanging[0].sendall(request(server, "/"))  # and takes no answer
        hanging[1].close()
        for connection in hanging:
            if connection.fileno() != -1:
                whole(connection)
                connection.close()
    with connect(server) as last:
        last.sendall(request(server))
        assert whole(last).startswith(b"HTTP/1.0 200 OK\r\n")


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 20_000, b"431"),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"403"),
        (b"GET / HTTP/1.1\r\n\r\n", b"403"),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", b"501"),
        (b"\x00\xff\xfe\r\n\r\n", b"400"),
        (b"GET / HTTP/9.9\r\n\r\n", b"505"),
        (b"nonsense \x1b[31m words and more\r\n\r\n", b"400"),
    ],
)
def test_nonsense_is_answered_with_its_code(server, sent, code, capfd):
    with connect(server) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        answer = whole(connection)
    assert answer.split(b" ", 2)[1] == code
    with connect(server) as connection:
        connection.sendall(request(server))
        assert whole(connection).startswith(b"HTTP/1.0 200 OK\r\n")
    assert "Traceback" not in capfd.readouterr().err


def test_whoever_takes_no_answer_is_given_up(server, monkeypatch, capfd):
    monkeypatch.setattr(serve, "RESPONSE_SECONDS", 0.2)
    monkeypatch.setattr(server, "content", lambda: {"much": "x" * 30_000_000})
    left = threading.Event()
    handled = server.process_request_thread
    monkeypatch.setattr(server, "process_request_thread", lambda *args: (handled(*args), left.set()))
    with connect(server) as stuck:
        stuck.sendall(request(server))
        assert left.wait(20)
        try:
            got = len(whole(stuck))
        except ConnectionError:
            got = 0
    assert got < 30_000_000
    assert "Traceback" not in capfd.readouterr().err
