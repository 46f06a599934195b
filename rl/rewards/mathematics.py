"""Equivalence of mathematical answers, by the package math-verify (Hugging Face)."""

import logging

import math_verify as checker

_FORMS = (checker.LatexExtractionConfig(), checker.ExprExtractionConfig())
# It warns that its time limits are off; they use SIGALRM, and this process has one of its own.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_verify(completion: str, ground_truth: str) -> float:
    """1.0 if the completion's answer equals the ground truth: 1/2 is 0.5 is \\frac{1}{2}.

    The answer is the last boxed or final expression of the completion, in LaTeX or plain. The
    ground truth is LaTeX with or without dollars, or a plain expression; ValueError if it is
    neither. A completion without an answer is wrong.
    """
    wanted = _expected(ground_truth)
    if not wanted:
        raise ValueError(f"the ground truth {ground_truth!r:.40} holds no mathematics")
    found = checker.parse(completion, _FORMS, parsing_timeout=None)
    return float(checker.verify(wanted, found, timeout_seconds=None))


def _expected(ground_truth: str) -> list:
    text = ground_truth.strip()
    is_marked = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
    tried = (text,) if is_marked else (f"${text}$", text)
    parsed = (checker.parse(form, _FORMS, parsing_timeout=None) for form in tried)
    return next(filter(None, parsed), [])
