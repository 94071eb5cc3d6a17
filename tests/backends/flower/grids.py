"""A Flower grid in this process: the real strategy and the real ClientApp, without a network between them."""

import itertools

from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity


class LocalGrid(Grid):
    """Nodes with random-looking ids, each with a client's index in its configuration. `lose` may drop a reply."""

    def __init__(self, app, clients, lose=None, ids=None):
        self.app = app
        self.nodes, self.keys = {}, {}
        self._messages, self._waiting = itertools.count(), {}
        self._ids = ids or itertools.count(7_000_003, 977)
        for client in range(clients):
            self.join(client, clients)
        self.lose = lose or (lambda message, reply: reply)
        self.replies = []
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # what Flower sets in each process

    def join(self, client, of, key=b""):
        """A node comes online (again): a new id, nothing remembered."""
        self.nodes = {n: c for n, c in self.nodes.items() if c.node_config["partition-id"] != client}
        node = next(self._ids)
        self.keys[node] = key
        config = {"partition-id": client, "num-partitions": of}
        self.nodes[node] = Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})
        return node

    def leave(self, client):
        self.nodes = {n: c for n, c in self.nodes.items() if c.node_config["partition-id"] != client}

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self):
        return list(self.nodes)

    def get_nodes(self):
        return [NodeInfo(node_id=node, public_key=self.keys.get(node, b"")) for node in self.nodes]

    def push_messages(self, messages):
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(next(self._messages))
        for message in list(messages)[::-1]:  # no order may be relied on
            node, key = message.metadata.dst_node_id, message.metadata.message_id
            if node not in self.nodes:
                self._waiting[key] = Message(Error(code=3, reason="node is gone"), reply_to=message)
                continue
            kept = self.lose(message, self.app(message, self.nodes[node]))
            if kept is not None:
                self._waiting[key] = kept
                self.replies.append(kept)
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids):
        replies = [self._waiting.pop(key) for key in message_ids if key in self._waiting]
        for reply in replies:
            if isinstance(reply, Exception):  # bytes that Flower itself cannot read
                raise reply
        return replies

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))
