"""Verifiable tasks: prompts with one right answer, split into train and held-out by the prompt itself."""

from experiments.tasks.protocol import Example as Example
from experiments.tasks.protocol import Reward as Reward
from experiments.tasks.protocol import Rewarded as Rewarded
from experiments.tasks.protocol import Split as Split
from experiments.tasks.protocol import Task as Task
from experiments.tasks.protocol import split_of as split_of
from experiments.tasks.registry import TASK_FORMS as TASK_FORMS
from experiments.tasks.registry import make_task as make_task
