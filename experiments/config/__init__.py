"""Options of a run as nested frozen dataclasses, one section per file."""

from experiments.config.correction import CorrectionConfig as CorrectionConfig
from experiments.config.correction import RejectionConfig as RejectionConfig
from experiments.config.data import DataConfig as DataConfig
from experiments.config.data import RewardConfig as RewardConfig
from experiments.config.guards import GuardsConfig as GuardsConfig
from experiments.config.loss import LossConfig as LossConfig
from experiments.config.model import ModelConfig as ModelConfig
from experiments.config.optimizer import OptimizerConfig as OptimizerConfig
from experiments.config.ranges import validate as validate
from experiments.config.reports import CheckpointConfig as CheckpointConfig
from experiments.config.reports import DriftConfig as DriftConfig
from experiments.config.reports import EvaluationConfig as EvaluationConfig
from experiments.config.rollout import RolloutConfig as RolloutConfig
from experiments.config.run import Config as Config
from experiments.config.schedule import ScheduleConfig as ScheduleConfig
from experiments.config.warm_start import WarmStartConfig as WarmStartConfig
from experiments.invariant.options import InvarianceConfig as InvarianceConfig
