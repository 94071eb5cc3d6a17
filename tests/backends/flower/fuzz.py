"""Replies of hostile clients: genuine ones, damaged at random, through Flower's own protobuf and back."""

import random
import time
import tracemalloc

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage

from fedbcgd.backends.flower import wire
from fedbcgd.backends.flower.exchange import exchange

NAN, INF = float("nan"), float("inf")
NUMBERS = [NAN, INF, -INF, 1e300, -1, 0, 1, 7, 0.5, 2**31, 2**40 + 1, 2**63, 2**64 - 1, [3], [NAN, INF], [0] * 1000]
VALUES = [*NUMBERS, "abc", "", "x" * 100_000, "\x1b[2J\n", b"", b"\xff\x00", True, False, ["a"], [b""], [True]]


def through_protobuf(message):
    return message_from_proto(ProtoMessage.FromString(message_to_proto(message).SerializeToString()))


class Mutator:
    """Damages replies, each in one to three ways."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.count = 0

    def __call__(self, message, reply):
        """The damaged reply, or the exception that reading its bytes raises, as a grid would."""
        self.count += 1
        rng = self.rng
        if rng.random() < 0.05:
            reply = Message(Error(code=rng.randrange(10), reason="y" * rng.choice([0, 10, 100_000])), reply_to=message)
        elif rng.random() < 0.1:
            told = {"failed": rng.choice(VALUES), "state_lost": rng.choice([True, False, 1, "yes"])}
            reply = Message(RecordDict({wire.VALUES: ConfigRecord(told | self._token(reply))}), reply_to=message)
        ways = [self.value, self.value, self.key, self.record, self.array, self.array, self.metric, self.metadata]
        for _ in range(rng.randint(1, 3)):
            rng.choice(ways)(reply)
        try:
            data = bytearray(message_to_proto(reply).SerializeToString())
            if rng.random() < 0.2:
                for _ in range(rng.randint(1, 5)):
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            return message_from_proto(ProtoMessage.FromString(bytes(data)))
        except Exception as error:
            return error

    def _token(self, reply):
        told = reply.content.get(wire.VALUES, {}) if reply.has_content() else {}
        return {wire.TOKEN: told[wire.TOKEN]} if wire.TOKEN in told else {}

    def _pick(self, reply, kind):
        records = [r for r in reply.content.values() if isinstance(r, kind) and len(r)] if reply.has_content() else []
        return self.rng.choice(records) if records else None

    def value(self, reply):
        record = self._pick(reply, ConfigRecord)
        if record is not None:
            keys = [key for key in record if key != wire.TOKEN or self.rng.random() < 0.1]
            if keys:
                record[self.rng.choice(keys)] = self.rng.choice(VALUES)

    def key(self, reply):
        record = self._pick(reply, ConfigRecord)
        if record is not None:
            if self.rng.random() < 0.5:
                del record[self.rng.choice(list(record))]
            for k in range(self.rng.choice([0, 1, 1, 5000])):
                record[self.rng.choice(["failed", "more", "client", "z" * 10_000]) + str(k or "")] = 1

    def metric(self, reply):
        record = self._pick(reply, MetricRecord)
        if record is not None:
            name = self.rng.choice([*record, "n" * 1000, "", "\x1b[2J", "own"])
            record[name] = self.rng.choice(NUMBERS)
            if self.rng.random() < 0.2:
                record.update({f"m{k}": 1.0 for k in range(1000)})
            if self.rng.random() < 0.3:
                del record[self.rng.choice(list(record))]

    def record(self, reply):
        if not reply.has_content():
            return
        rng, content = self.rng, reply.content
        name = rng.choice([*content, "other"])
        if rng.random() < 0.4:
            content.pop(name, None)
        for k in range(rng.choice([0, 1, 1, 1000])):
            kind = rng.choice([ConfigRecord({"a": 1}), MetricRecord({"a": 1.0}), ArrayRecord()])
            content[name if k == 0 else f"{name}{k}"] = kind

    def array(self, reply):
        record = self._pick(reply, ArrayRecord)
        if record is None:
            return
        rng, name = self.rng, self.rng.choice(list(record))
        a = record[name]
        floats = rng.choice([NAN, INF, 1e38, -1e-45, 1.0])
        data = rng.choice(
            [
                a.data,
                b"",
                a.data[: rng.randrange(len(a.data) + 1)],
                a.data * 3,
                bytes(1 << 20),
                rng.randbytes(len(a.data)),
                torch.full((len(a.data) // 4,), floats).numpy().tobytes(),
            ]
        )
        shape = rng.choice([(len(data),), (len(data),), (len(data),), (), (-1,), (2, len(data) // 2), (2**62,)])
        dtype, stype = (
            rng.choice(["uint8", "uint8", "float32", ""]),
            rng.choice([wire.STYPE, wire.STYPE, "numpy.ndarray"]),
        )
        if rng.random() < 0.3:
            del record[name]
            name = rng.choice(["dx.9", "dx.-1", "dx.0x0", "dx", "dx.00", ".", "w" * 10_000, "dc.0"])
        record[name] = Array(dtype, shape, stype, data)
        if rng.random() < 0.1:
            record.update({f"dx.{k}": a for k in range(2000)})

    def metadata(self, reply):
        fields = {"_src_node_id": self.rng.randrange(2**63), "_reply_to_message_id": str(self.rng.randrange(100))}
        fields |= {"_group_id": "g" * 1000, "_message_type": self.rng.choice(["train", "evaluate", "query.fedbcgd"])}
        name = self.rng.choice(list(fields))
        reply.metadata.__dict__[name] = fields[name]


class Measured:
    """How long the longest call took, and the most memory that one needed beyond what was there."""

    def __init__(self):
        self.seconds, self.bytes = 0.0, 0

    def __call__(self, function):
        def measured(*arguments):
            tracemalloc.start()
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds = max(self.seconds, time.perf_counter() - start)
                self.bytes = max(self.bytes, tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()

        return measured


def fuzz(federation, grid, mutator, messages, hostile, clients):
    """Rounds in which the hostile clients' replies are damaged; the model is put back after each. Returns the costs."""
    cost = Measured()
    federation.roster._read_answer = cost(federation.roster._read_answer)
    grid.lose = lambda message, reply: reply
    server = federation._open(grid, None).server
    take, aggregate = cost(federation.rounds.take), cost(federation.aggregate_evaluate)
    start, _ = server.snapshot()

    def lose(message, reply):
        client = grid.nodes[message.metadata.dst_node_id].node_config["partition-id"]
        bad = client in hostile and (message.metadata.message_type != wire.HELLO or mutator.rng.random() < 0.3)
        return mutator(message, reply) if bad else through_protobuf(reply)

    grid.lose = lose
    while mutator.count < messages:
        for client in hostile:
            grid.join(client, clients)
        for reply in exchange(grid, federation.configure_train(2, None, None, grid), 0):
            take(reply)
        server.commit()
        federation.rounds.committed()
        assert server.last.accepted >= clients - len(hostile)
        values = [server.x, *server.controls.values(), *server.state.values()]
        assert all(v.isfinite().all() for v in values)
        for reply in exchange(grid, federation.configure_evaluate(0, None, None, grid), 0):
            aggregate(0, [reply])
        grid.replies.clear()
        # Finite values that are wrong may be accepted; what they do to the honest clients is not asked here.
        server.x.copy_(start["x"])
        for name, vector in server.state.items():
            vector.copy_(start[f"server.{name}"])
        if any(vector.abs().max() > 1e3 for vector in server.controls.values()):
            server.reset_controls()
            federation.rounds.accepted = {}
    return cost
