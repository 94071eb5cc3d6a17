"""Keeps a client's new state if its upload is accepted. All backends reserve, accept and discard slots through it."""

from fedbcgd.core.messages import StateUpdate, Upload
from fedbcgd.engine.backend import Inbox
from fedbcgd.engine.client_state import StateStore


class NewState:
    """A slot that is reserved for a client's new state, which becomes valid if the server accepts the upload.

    Attributes:
        old: the slot of the state that the task begins with; None: that state is zero.
        new: the slot of the state that the task produces; None: the algorithm keeps no state.
    """

    def __init__(self, store: StateStore, client: int, epoch: int):
        self._store = store
        self._client = client
        self._epoch = epoch
        self.old = store.slot(client, epoch)
        self.new = store.reserve()

    def hand_in(self, inbox: Inbox, upload: Upload, update: StateUpdate | None = None) -> bool:
        """Hand the upload to the server, and keep the new state if the server accepts it.

        Args:
            inbox: receives the uploads of the round.
            upload: the client's upload.
            update: the new state; None if it is in slot `new` already.

        Returns:
            Whether the server accepted the upload.
        """
        accepted = inbox.receive(upload, self._client).accepted
        if not accepted:
            self._store.discard(self.new)
            return False
        if update is not None and self.new is not None and self._store.file is not None:
            self._store.file.write(self.new, self.old, update)
        self._store.accept(self._client, self.new, self._epoch)
        return True
