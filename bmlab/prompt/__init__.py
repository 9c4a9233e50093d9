"Templates, labels as words, soft tokens, and CPM-Bee's tasks."
from .bee import Bee, BeeError, encode_bee
from .bee_answers import BeeCollator, answer
from .classify import FewShotSampler, PromptData, PromptModel
from .language import TemplateError
from .learned import ProtoVerbalizer, SoftVerbalizer
from .openprompt import ManualTemplate, MixedTemplate, PTRTemplate, PrefixTuningTemplate, PtuningTemplate, SoftTemplate
from .search import find_templates, rank_templates
from .soft import SoftTokens
from .targets import GenerationVerbalizer, Written, write
from .template import InputExample, Template, one_batch
from .verbalize import AutomaticVerbalizer, KnowledgeableVerbalizer, PtrVerbalizer, Verbalizer
from .wordnet import WordNet, expand_words, word_list, wordnet
