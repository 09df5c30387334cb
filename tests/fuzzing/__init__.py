"""Fuzzing: every input ends in a result or in a clear error of ours; none hangs, crashes or changes a text.

An input is a few bytes: a damaged file, or the JSON of what a strategy drew. A `Target` makes inputs and
checks one; `judging` says what counts as a failure; `running` runs many in processes of their own. A failing
input is kept in tests/corpus and is a test from then on. To add a target, write a module like `templates` and
name it in `targets`.
"""
