"""Everything that is set rather than trained: one place answers "who sets this?".

| module | sets | from |
| --- | --- | --- |
| corrections | balance, common cause, γ and \\|b_noise\\|, C, κ | a text, at conversion |
| words | the width of scale_S and C again | rows that training did not use, after it |
| gain | κ again | rows that training did not use, after it |
| number_head | value space, b_<NUM>, w, b_Y, β_Y | training rows, before and after training |
| conformal | conformal_scores | rows that training did not use, after it |

It does not know where models and rows come from, nor metrics.
"""

from causal_qwen.calibration.conformal import fit_conformal
from causal_qwen.calibration.corrections import Calibration, calibrate
from causal_qwen.calibration.gain import recalibrate_gain
from causal_qwen.calibration.number_head import refit_numbers, set_value_space, wake_numbers
from causal_qwen.calibration.text import TextFeatures, text_features
from causal_qwen.calibration.words import WordFit, refit_words

__all__ = [
    "Calibration",
    "TextFeatures",
    "WordFit",
    "calibrate",
    "fit_conformal",
    "recalibrate_gain",
    "refit_numbers",
    "refit_words",
    "set_value_space",
    "text_features",
    "wake_numbers",
]
