"""Messages between the trainer and a process that scores, over a stream socket.

A message is a pickled object behind its length. Whatever has arrived is read at once: hundreds of scores a millisecond
cost a few system calls, not three each.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections import deque
from typing import Any

LENGTH = struct.Struct("!Q")
AT_ONCE = 1 << 16  # bytes
GONE = (EOFError, BrokenPipeError, ConnectionResetError)
"""Exceptions of a channel whose other end is closed."""


class Channel:
    """Sends and receives messages at one end of a stream socket. To wait for several channels, wait for their
    sockets."""

    def __init__(self, end: socket.socket):
        self.socket = end
        self.unread = bytearray()
        self.messages: deque[Any] = deque()

    def send(self, message: Any) -> None:
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self.socket.sendall(LENGTH.pack(len(content)) + content)

    def receive(self) -> Any:
        """Returns the next message, and waits for it; raises EOFError once the other end is closed."""
        while not self.messages:
            self._take(self.socket.recv(AT_ONCE))
        return self.messages.popleft()

    def arrived(self) -> list[Any]:
        """Returns all messages that have arrived; raises EOFError if there is none and the other end is closed."""
        try:
            while True:
                self._take(self.socket.recv(AT_ONCE, socket.MSG_DONTWAIT))
        except BlockingIOError:
            pass
        except (EOFError, ConnectionResetError):
            if not self.messages:
                raise
        messages = list(self.messages)
        self.messages.clear()
        return messages

    def has_something(self) -> bool:
        """True if a message has arrived, or the end."""
        if self.messages:
            return True
        try:
            self.socket.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            pass
        return True

    def close(self) -> None:
        self.socket.close()

    def _take(self, content: bytes) -> None:
        """Appends what was read, and cuts off the messages that are whole."""
        if not content:
            raise EOFError
        self.unread += content
        start = 0
        while len(self.unread) - start >= LENGTH.size:
            begin = start + LENGTH.size
            end = begin + LENGTH.unpack_from(self.unread, start)[0]
            if end > len(self.unread):
                break
            self.messages.append(pickle.loads(self.unread[begin:end]))
            start = end
        del self.unread[:start]
