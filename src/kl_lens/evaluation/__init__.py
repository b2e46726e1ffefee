"""Perplexity, KL from the original and task accuracy, of plans in PyTorch and of exported files."""

from kl_lens.evaluation.agreement import Agreement
from kl_lens.evaluation.evaluator import Evaluator, Outcome
from kl_lens.evaluation.journal import ScoreJournal, read_scores
from kl_lens.evaluation.judged import Judged, JudgedArtifact, JudgedModel, planned_recipes
from kl_lens.evaluation.scoring import divergence_values, likelihood_values, score_text
from kl_lens.evaluation.selection import Selection, artifact_task, given_subjects, run_subjects
from kl_lens.evaluation.texts import EvaluationText, prepare, prepare_text
from kl_lens.evaluation.torch_session import TorchSession
from kl_lens.targets import SessionSettings

__all__ = [
    "Agreement",
    "EvaluationText",
    "Evaluator",
    "Judged",
    "JudgedArtifact",
    "JudgedModel",
    "Outcome",
    "ScoreJournal",
    "Selection",
    "SessionSettings",
    "TorchSession",
    "artifact_task",
    "divergence_values",
    "given_subjects",
    "likelihood_values",
    "planned_recipes",
    "prepare",
    "prepare_text",
    "read_scores",
    "run_subjects",
    "score_text",
]
