"""Sequences of Higgs TTS 3: prompts, delay pattern, labels, and how a conversation becomes one of
them.

A prompt has neither roles nor a system text:

    plain             <|tts|> <|text|> text <|audio|>
    clone             <|tts|> <|ref_text|> text <|ref_audio|> rows <|text|> text <|audio|>
    clone, no text    <|tts|> <|ref_audio|> rows <|text|> text <|audio|>

T frames of codes become T + 7 rows: codebook k holds k begin-of-codes (BOC), its T codes, 7 - k
end-of-codes (EOC). The hidden state at <|audio|> predicts row 0, that of row r row r + 1; the last
row is never an input. Trained are the codes and all EOC: a model that was not taught to fill the
codebooks that have ended never stops, since nothing fills them for it when it speaks. The layout is
what sglang-omni 0.1.9 and vllm-omni 0.30 serve.
"""
import re
from dataclasses import dataclass, replace

import numpy as np
import torch

from speech.conversations import BadSample
from speech.labels import IGNORE

TOKENS = {"tts": "<|tts|>", "text": "<|text|>", "audio": "<|audio|>", "ref_audio": "<|ref_audio|>",
          "ref_text": "<|ref_text|>"}
AUDIO_PLACEHOLDER = -100    # of a whole clip in a table, as in the released config.json
MIN_FRAMES = 8          # the servers look for the end from row 8 on: a shorter clip could not end
TAG = re.compile(r"<\|[a-z_]+:[a-z_]+\|>")          # control tags, as <|emotion:elation|>
SPEAKER = re.compile(r"\[SPEAKER\d+\]\s*")


@dataclass(frozen=True)
class Ids:
    """Special token ids and codes, with labels.TokenIds' methods. ref_text: None if it has none."""
    tts: int
    text: int
    audio: int
    ref_audio: int
    ref_text: int | None = None
    pad: int = 0                # in the places of audio rows, and padding; not looked at
    num_codebooks: int = 8
    stream_bos: int = 1024      # BOC
    stream_eos: int = 1025      # EOC
    audio_placeholder_id = AUDIO_PLACEHOLDER
    min_frames = MIN_FRAMES
    lone_reference = True       # a reference may have no text

    def forbidden(self, tokenizer):
        """{id: token} of what no text may spell: every added token but control tags."""
        added = tokenizer.get_added_vocab().items()
        return {i: token for token, i in added if not TAG.fullmatch(token)}

    def known_tags(self, tokenizer):
        """Control tags that the tokenizer has."""
        return frozenset(filter(TAG.fullmatch, tokenizer.get_added_vocab()))

    def streams(self, sample):
        """[(name, pieces)] of a Sample, one for each trained clip, and what had to be left out."""
        return streams(sample, self)

    def rows(self, frames, trained):
        """Input rows of a clip of this many frames: a trained clip's last row is never one."""
        return frames + self.num_codebooks - 1 - trained

    def targets(self, frames):
        """Trained codes and EOC of a clip of this many frames."""
        return self.num_codebooks * frames + self.num_codebooks * (self.num_codebooks - 1) // 2

    def predicting(self, frames):
        """Rows that predict a trained clip of this many frames."""
        return frames + self.num_codebooks - 1

    def assemble(self, tokens, labelled, codes):
        """One sample as the model sees it: each placeholder becomes its clip's delayed rows.

        tokens (t,) int64, labelled (t,) bool, codes: one (T, 8) array per clip. Returns a dict of
        input_ids (n,), is_audio (n,), text_labels (n,), audio_ids (a, 8), audio_at (R,),
        audio_targets (R, 8); text is never a label.
        """
        places = np.flatnonzero(tokens == AUDIO_PLACEHOLDER)
        repeats, rows = np.ones(len(tokens), np.int64), []
        at, targets = np.empty(0, np.int64), np.empty((0, self.num_codebooks), np.int64)
        for place, clip in zip(places, codes):
            whole = delay(clip, self.stream_bos, self.stream_eos).numpy()
            # the last row of a trained clip is predicted, but predicts nothing
            rows.append(whole[:-1] if labelled[place] else whole)
            repeats[place] = len(rows[-1])
            if labelled[place]:
                # row r is predicted one place before it: row 0 by <|audio|>
                at = np.arange(len(whole)) + repeats[:place].sum() - 1
                targets = np.where(label_mask(len(clip), self.num_codebooks).numpy(), whole, IGNORE)
        is_audio = np.repeat(tokens == AUDIO_PLACEHOLDER, repeats)
        input_ids = np.where(is_audio, self.pad, np.repeat(tokens, repeats))
        empty = np.empty((0, self.num_codebooks), np.int64)
        # targets are at the places that predict them; V2's are at their rows
        return {"input_ids": input_ids, "is_audio": is_audio,
                "text_labels": np.full(len(input_ids), IGNORE),
                "audio_ids": np.concatenate([empty, *rows]), "audio_at": at,
                "audio_targets": targets}


def delay(codes, bos=1024, eos=1025):
    """(T, K) codes -> (T + K - 1, K) int64 rows: book k is k BOC, its T codes, K - 1 - k EOC."""
    codes = torch.as_tensor(codes).long()
    frames, books = codes.shape
    rows = torch.full((frames + books - 1, books), eos)
    for k in range(books):
        # unlike V2 no row of BOC alone comes first, and none of EOC alone last
        rows[:k, k] = bos
        rows[k:k + frames, k] = codes[:, k]
    return rows


def undelay(rows):
    """(T + K - 1, K) rows -> (T, K) codes, delay's inverse; (0, K) for less than a frame's."""
    rows = torch.as_tensor(rows)
    books = rows.shape[1]
    # speech that was cut off may have fewer rows than a frame
    frames = max(0, len(rows) - books + 1)
    return torch.stack([rows[k:k + frames, k] for k in range(books)], dim=1)


def label_mask(frames, books=8):
    """(T + 7, 8) bool, True where a cell of delay's rows is trained: codes and every EOC."""
    # the server forces BOC while the delay builds up; EOC it never fills in: they are learnt
    return torch.arange(frames + books - 1)[:, None] >= torch.arange(books)


def streams(sample, ids):
    """([(name, [(text or Clip, labelled)])], [what was left out]) of a canonical Sample, for
    speech.dataset.

    One stream for each trained clip: its text, and as its reference the assistant's clip before it
    with that one's text. Raises BadSample for a text of several speakers, or a clip without text.
    """
    found, left_out = [], []
    reference, asked = None, ""
    for number, turn in enumerate(sample.turns):
        # a prompt has no place for what V2 puts into its system turn
        if turn.role == "system":
            if turn.clips:
                left_out.append("lose their scene's clip")
            if turn.text.strip():
                left_out.append("lose their system or scene text")
        elif turn.role == "user":
            asked = turn.text.strip()
        spoken = said_by_clip(turn, asked) if turn.role == "assistant" else []
        for place, (text, clip) in enumerate(spoken):
            if turn.trained and len(set(map(str.strip, SPEAKER.findall(text)))) > 1:
                raise BadSample("has several speakers in one clip, which Higgs TTS 3 has no marks "
                                "for")
            # [SPEAKER0] would be read aloud: the model has never seen it
            if SPEAKER.search(text):
                left_out.append("lose a speaker's mark")
                text = SPEAKER.sub("", text)
            if turn.trained:
                if not text:
                    raise BadSample("the trained clip has no text")
                name = sample.name
                if sum(t.trained for t in sample.turns) > 1:
                    name += f" message {turn.source}"
                if len(turn.clips) > 1:
                    name += f" clip {place}"
                found.append((name, pieces(text, clip, reference, ids.ref_text is not None)))
            # the model has one reference: the clip before, whether trained or given
            if reference and not turn.trained and number:
                left_out.append("lose an earlier reference: the last one stays")
            reference = (text, clip)
    if not found:
        left_out.append("are dropped: they train no clip")
    return found, sorted(set(left_out))


def said_by_clip(turn, asked):
    """[(text, Clip)] of an assistant's turn. Of several clips each says the text between it and
    the clip before.

    asked: the user's text before the turn, which the first clip says where no text precedes
    that.
    """
    if len(turn.clips) < 2:
        return [(turn.text.strip() or asked, clip) for clip in turn.clips]
    found, words = [], ""
    for part in turn.parts:
        if isinstance(part, str):
            words += part
        else:
            found.append((words.strip() or ("" if found else asked), part))
            words = ""
    if words.strip() and turn.trained:
        raise BadSample("has text after the last of several clips: put each text before its clip")
    return found


def pieces(text, clip, reference, marks_text):
    """[(text or Clip, labelled)] of a prompt and its clip. reference: (text, Clip) or None."""
    stream = [(TOKENS["tts"], False)]
    # text of the reference only where the tokenizer can mark it
    if reference and reference[0] and marks_text:
        stream += [(TOKENS["ref_text"], False), (reference[0], False)]
    if reference:
        # short references are filled up with silence, as the servers do
        stream += [(TOKENS["ref_audio"], False), (replace(reference[1], filled=True), False)]
    return [*stream, (TOKENS["text"], False), (text, False), (TOKENS["audio"], False), (clip, True)]
