"""Calibration of one model on one text, done once for all tests of a session.

Many tests convert the embedded base, and nearly all of that time is spent on fitting the same numbers to the
same text. Whoever asks first fits them, in whichever worker, and keeps them; the others take them.
"""

import hashlib
from dataclasses import asdict

import torch
from filelock import FileLock

from causal_qwen.calibration import Calibration, calibrate, text_features

HEADS = ("abduction", "action")  # what calibration sets


def digest(model, text, seed):
    """Names what is calibrated: every weight, the text and the seed."""
    key = hashlib.sha256(f"{model.config.to_json_string()}\n{seed}\n{text}".encode())
    for name, tensor in model.state_dict().items():
        key.update(name.encode())
        key.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return key.hexdigest()


class Calibrations:
    """`text_features` and `calibrate` for `convert`, with the results of both kept in a directory."""

    def __init__(self, directory):
        self.directory = directory

    def text_features(self, model, tokenizer, text, *, watch):
        return tokenizer, text  # read when nobody has calibrated on it yet

    def calibrate(self, model, features, *, seed, watch):
        tokenizer, text = features
        file = self.directory / f"calibration-{digest(model, text, seed)}.pt"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                fitted = calibrate(
                    model, text_features(model, tokenizer, text, watch=watch), seed=seed, watch=watch
                )
                heads = {name: getattr(model, name).state_dict() for name in HEADS}
                torch.save((heads, model.config.noise_gain, asdict(fitted)), file)
                return fitted
        heads, model.config.noise_gain, fitted = torch.load(file)
        for name in HEADS:
            getattr(model, name).load_state_dict(heads[name])
        return Calibration(**fitted)
