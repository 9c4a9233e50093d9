"Memory, time and cost, known before anything runs."
from .cost import cost_table
from .machine import Machine, measure
from .training import TrainingPlan, plan_training
