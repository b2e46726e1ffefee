"""Perplexity, KL from the original and task accuracy, of plans in PyTorch and of exported files."""

from kl_lens.judging.evaluator import (
    Evaluator as Evaluator,
    Outcome as Outcome,
    ScoreJournal as ScoreJournal,
    read_scores as read_scores,
)
from kl_lens.judging.judged import (
    Judged as Judged,
    JudgedArtifact as JudgedArtifact,
    JudgedModel as JudgedModel,
    Selection as Selection,
    artifact_task as artifact_task,
    given_subjects as given_subjects,
    planned_recipes as planned_recipes,
    run_subjects as run_subjects,
)
from kl_lens.judging.scoring import score_text as score_text
from kl_lens.judging.texts import EvaluationText as EvaluationText, prepare as prepare
from kl_lens.judging.torch_session import TorchSession as TorchSession
from kl_lens.run.readings import divergence_values as divergence_values
