"""Text of a growing list of tokens, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from flashkernel.engine.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Decodes tokens as they come and looks for stop strings.

    Text that may be the beginning of a stop string is held back until the next tokens decide.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], skip_special_tokens: bool) -> None:
        self._tokenizer, self._stop, self._skip = tokenizer, stop, skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._num_decoded = 0  # tokens whose text is in `text`
        self._pieces: list[str] = []  # of `text`
        self._next: list[str] = []  # pieces that `next_text` has not returned
        self._tail = ""  # the end of the text, in which a stop string may have begun
        self._tail_length = max(map(len, stop), default=1) - 1
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything before a stop string. Joined when it is asked for: to add to a long text is to copy it."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def append(self, token_id: int, *, decode: bool = True, may_stop: bool = True) -> None:
        """Adds a token. `stopped` is True if it completed a stop string, which is removed from `text`.

        Without `may_stop` stop strings are text.

        `decode=False` leaves the text of all tokens to `finish`; it must be the same for all tokens of a sequence.
        """
        self._token_ids.append(token_id)
        if not decode:
            return
        try:
            piece = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # the library raises nothing more specific
            # Bytes that are no UTF-8 change how those before them are decoded, and the stream cannot go on.
            self._stream = DecodeStream(skip_special_tokens=self._skip)
            piece = self._undecoded()
        if piece:
            self._num_decoded = len(self._token_ids)
            self._extend(piece, may_stop)

    def finish(self) -> None:
        """Decodes what is left: half a character at the end becomes a replacement mark."""
        if not self.stopped:
            whole = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip)
            self._extend(whole[len(self.text) :] if whole.startswith(self.text) else self._undecoded())

    def next_text(self, finished: bool = False) -> str:
        """Text since the last call; without `finished`, what may begin a stop string is held back."""
        piece = "".join(self._next)
        held_back = 0 if finished or self.stopped or not self._stop else self._num_held_back()
        self._next = [piece[len(piece) - held_back :]] if held_back else []
        return piece[: len(piece) - held_back]

    def _undecoded(self) -> str:
        """Text of the tokens that the stream holds back."""
        return self._tokenizer.decode(self._token_ids[self._num_decoded :], skip_special_tokens=self._skip)

    def _extend(self, piece: str, may_stop: bool = True) -> None:
        self._pieces.append(piece)
        self._next.append(piece)
        if not self._stop:
            return
        text, before = self._tail + piece, len(self._tail)
        places = (text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stop)  # those that end in the piece
        found = [place for place in places if place >= 0]
        if found and may_stop:
            too_many = len(text) - min(found)
            self._pieces = [self.text[: len(self.text) - too_many]]
            waiting = "".join(self._next)  # has all of the stop string: its beginning was held back
            self._next = [waiting[: len(waiting) - too_many]]
            self.stopped = True
        self._tail = text[max(0, len(text) - self._tail_length) :]

    def _num_held_back(self) -> int:
        """Number of characters at the end that may be the beginning of a stop string."""
        return max(_overlap(self._tail, stop) for stop in self._stop)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with and goes on after.

    Only places of the stop string's first character are looked at: stop strings may be as long as a request.
    """
    place = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while place >= 0 and not stop.startswith(text[place:]):
        place = text.find(stop[0], place + 1)
    return len(text) - place if place >= 0 else 0
