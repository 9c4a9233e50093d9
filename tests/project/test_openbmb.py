"""The page that maps OpenBMB's packages to this library: its code is run as it stands there, row by row, and no
public name of theirs is left out."""
import re

import pytest

from pages import CODE, ROOT, Page

PAGE = Page("coming_from_openbmb.md")
SECTIONS, PACKAGES = PAGE.sections, PAGE.packages


@pytest.mark.parametrize("title", PACKAGES)
def test_every_row_runs(title, tmp_path, monkeypatch):
    "In the order of the page, each in what the set-up above and the rows before it left"
    from bmlab.bmtrain import shutdown                                         # (ends the stand-ins for a GPU too)
    monkeypatch.chdir(tmp_path)
    try: PAGE.run(title)
    finally: shutdown()


@pytest.mark.parametrize("title", PACKAGES)
def test_every_row_says_how_it_compares(title): PAGE.check_verdicts(title)


def names(title):
    "Words of the left column's code"
    return {w for left, _ in SECTIONS[title][1] for code in CODE.findall(left) for w in re.findall(r"\w+", code)}


# What each package exports or documents, by the source of its last version
PUBLIC = {
    "BMTrain": """init_distributed is_initialized rank world_size config DistributedParameter ParameterInitializer
    DistributedModule init_parameters grouped_parameters BMTrainModelWrapper
        Block CheckpointBlock TransformerBlockList PipelineTransformerBlockList AdamOptimizer AdamOffloadOptimizer
        OptimManager add_optimizer scale_loss zero_grad backward clip_grad_norm step state_dict
        load_state_dict Noam Linear Cosine Exponential NoDecay WarmupLRScheduler FusedCrossEntropy OpParallelLinear
        ColumnParallelLinear RowParallelLinear VPEmbedding all_reduce all_gather
        reduce_scatter broadcast sum_loss gather_result synchronize wait_loader allgather_objects broadcast_object
        save load inspect_model inspect_tensor record_tensor get_summary format_summary
        debug print_rank print_block print_dict see_memory AverageRecorder benchmark checkpoint optim_step
        has_inf_nan""",
    "ModelCenter": """Bert BertConfig Roberta GPT2 GPTj T5 CPM1 CPM2 CPM3 GLM Longformer ViT OPT Llama from_pretrained
    from_json_file to_json_file BertTokenizer RobertaTokenizer T5Tokenizer
        GPT2Tokenizer GPTjTokenizer OPTTokenizer LlamaTokenizer CPM1Tokenizer CPM2Tokenizer GLMTokenizer Attention
        LayerNorm FeedForward RelativePositionEmbedding RotaryEmbedding Embedding Encoder Decoder TransformerBlock
        SelfAttentionBlock
        CrossAttentionBlock FFNBlock DistributedDataset SimpleDataset DatasetWriter build_dataset shuffle_dataset
        compact_dataset mask_dataset MMapIndexedDataset DistributedMMapIndexedDataset DistributedDataLoader
        make_builder preprocess_cpm1_lm print_inspect LlamaBeamSearch LlamaRandomSampling T5BeamSearch
        T5RandomSampling transfer""",
    "BMCook": """CookTrainer set_compression set_forward forward CPMAntTrainer ConfigParser BMQuant quantize BMPrune
    compute_mask set_optim_for_pruning m4n2_1d m4n2_2d sprune set_forward_sprune training_mask target_sparsity
    BMDistill ce_scale ce_temp
        mse_hidn_scale mse_hidn_module mse_hidn_proj mse_att_scale mse_att_module BMMoE get_hidden moefy ParamSplit
        GraphSplit MLPRouter save save_masks load_masks save_spruned""",
    "OpenDelta": """LoraModel BitFitModel CompacterModel AdapterModel PrefixModel SoftPromptModel LowRankAdapterModel
    ParallelAdapterModel AutoDeltaModel AutoDeltaConfig from_config from_finetuned from_dict
        modified_modules exclude_modules unfrozen_modules common_structure interactive_modify freeze_module
        save_finetuned log Visualization structure_graph attach detach DeltaBase BaseDeltaConfig CommonStructureMap
        inspect_optimizer_statistics create_hub_repo push_to_dc set_axis_order SaveLoadMixin logging""",
    "OpenPrompt": """InputExample InputFeatures load_plm load_plm_from_config add_special_tokens ManualTemplate
    MixedTemplate SoftTemplate SoftManualTemplate PtuningTemplate PTRTemplate PrefixTuningTemplate
    LMBFFTemplateGenerationTemplate wrap_one_example
        from_file incorporate_text_example TokenizerWrapper MLMTokenizerWrapper LMTokenizerWrapper T5TokenizerWrapper
        T5LMTokenizerWrapper CPM2TokenizerWrapper truncate_method PromptDataLoader tokenizer_wrapper_class
        ManualVerbalizer One2oneVerbalizer KnowledgeableVerbalizer AutomaticVerbalizer
        SoftVerbalizer ProtoVerbalizer PTRVerbalizer GenerationVerbalizer calibrate register_calibrate_logits
        PromptModel PromptForClassification PromptForGeneration generate FewShotSampler T5TemplateGenerator
        TemplateGenerator
        VerbalizerGenerator RobertaVerbalizerGenerator ClassificationRunner GenerationRunner LMBFFClassificationRunner
        ProtoVerbClassificationRunner PROCESSORS DataProcessor load_dataset load_template load_verbalizer signature
        set_seed
        classification_metrics generation_metric freeze_plm load_template_generator load_verbalizer_generator Template
        Verbalizer""",
    "BMInf": """wrapper quantization memory_limit QuantizedLinear TransformerBlockList CPM1 CPM2 EVA fill_blank
    generate dialogue top_n top_p temperature frequency_penalty presence_penalty spans_position
        stop_tokens device_idx dynamic_memory generate_cpm2""",
}


@pytest.mark.parametrize("title", PUBLIC)
def test_no_public_name_is_left_out(title):
    missing = set(PUBLIC[title].split()) - names(title)
    assert not missing, sorted(missing)


def test_names_that_bmtrain_keeps():
    "A dot after BMTrain's call says that `import bmlab.bmtrain as bmt` keeps it"
    import bmlab.bmtrain as bmt
    kept = [code for left, _ in SECTIONS["BMTrain"][1] if "●" in left for code in CODE.findall(left)]
    assert len(kept) > 40
    for code in kept:
        if not code.startswith("bmt."): continue
        what = bmt
        for part in re.match(r"bmt\.([\w.]+)", code)[1].split("."): what = getattr(what, part)


NAMES = (ROOT / "docs" / "bmtrain.md").read_text(encoding="utf-8")


def table_rows(page, title):
    "Cells of the rows of a section"
    part = re.split(rf"^## {title}$", page, flags=re.M)[1].partition("\n## ")[0]
    return [[c.strip() for c in line.split("|")[1:-1]] for line in part.splitlines() if line.startswith("| `")]


def test_each_of_bmtrains_names_is_where_its_row_says():
    import importlib
    import bmlab.bmtrain as bmt
    rows, kinds = table_rows(NAMES, "Its public names"), {"here": 0, "elsewhere": 0, "not": 0}
    for module, name, kind, where, remark in rows:
        kinds[kind] += 1
        assert (kind == "not") == (not where) and (kind != "not" or remark), name
        if kind == "not": continue
        first, *parts = where.strip("`").split(".")
        found = bmt if first == "bmt" else importlib.import_module(first)
        for part in parts:
            # (a room may have its function's name)
            try: found = importlib.import_module(f"{found.__name__}.{part}")
            except (ImportError, AttributeError): found = getattr(found, part)
        assert kind == "elsewhere" or parts[-1] == name.strip("`"), name
    assert len(rows) == len({tuple(r[:2]) for r in rows}) == 139
    told = re.search(r"The (\d+) functions .*? (\d+) are here .*? (\d+) are elsewhere .*? (\d+) are not", NAMES, re.S)
    assert [int(n) for n in told.groups()] == [139, *kinds.values()]


def test_each_of_bmtrains_tests_has_one_of_ours():
    rows, ours = table_rows(NAMES, "Its tests"), {}
    for path in (ROOT / "tests" / "train").glob("test_bmtrain*.py"):
        ours |= dict.fromkeys(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M), path)
    assert len(rows) == 26
    for file, what, by, remark in rows:
        assert (by.strip("`") in ours and what) or "does not apply" in remark, file
        for named in re.findall(r"`(test_\w+)`", remark): assert named in ours, named
