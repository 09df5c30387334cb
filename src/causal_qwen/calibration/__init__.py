"""Everything that is set rather than trained: one place answers "who sets this?".

| module | sets | from |
| --- | --- | --- |
| corrections | balance, common cause, γ and \\|b_noise\\|, C, κ | a text, at conversion |
| words | the width of scale_S and C again | rows that training did not use, after it |
| gain | κ again | rows that training did not use, after it |
| number_head | value space, w, b_Y, β_Y, folds, support, range; <NUM>, end in W, b, C | training rows |
| conformal | conformal_… | rows that training did not use, after it; with folds, by number_head |

It does not know where models and rows come from, nor metrics.
"""

from causal_qwen.calibration.conformal import fit_conformal, give_up_where_moved
from causal_qwen.calibration.corrections import Calibration, calibrate
from causal_qwen.calibration.gain import recalibrate_gain
from causal_qwen.calibration.number_head import (
    NumberData,
    number_data,
    rounding_errors,
    set_value_space,
    solve_numbers,
    wake_numbers,
)
from causal_qwen.calibration.placing import place_end_token, place_num_token
from causal_qwen.calibration.text import TextFeatures, text_features
from causal_qwen.calibration.words import WordFit, refit_words

__all__ = [
    "Calibration",
    "NumberData",
    "TextFeatures",
    "WordFit",
    "calibrate",
    "fit_conformal",
    "give_up_where_moved",
    "number_data",
    "place_end_token",
    "place_num_token",
    "recalibrate_gain",
    "refit_words",
    "rounding_errors",
    "set_value_space",
    "solve_numbers",
    "text_features",
    "wake_numbers",
]
