"""The model card says what was trained; names from elsewhere stay words."""

from causal_qwen import CausalQwen2Config
from causal_qwen.data import BadRows
from causal_qwen.training import TrainingRecipe
from causal_qwen.training.card import model_card


def test_names_are_words_in_the_card():
    recipe = TrainingRecipe(
        output="o", model="a`b<img src=x>\n# c", run_name="<script>alert(1)</script> [x](http://e) |\n# y"
    )
    card = model_card(
        recipe, {"train/numbers": 7.0}, CausalQwen2Config(), BadRows("skip", count=2), numbers="written"
    )
    assert "<script>" not in card
    assert "[x](" not in card
    assert [line for line in card.splitlines() if line.startswith("# ")] == [
        "# &lt;script&gt;alert(1)&lt;/script&gt; \\[x\\](http://e) \\| \\# y"
    ]
    assert "`a'b<img src=x> # c`" in card  # code: nothing in it is markup
    assert "| train/numbers | numbers learned from | 7 |" in card
    assert "Digits in prompts are read as the base reads them" in card
