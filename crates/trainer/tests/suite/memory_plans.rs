//! Memory estimates without training: counted parts, errors, and figures of the documentation.

use std::path::{Path, PathBuf};

use anyhow::Error;
use burn::backend::{Autodiff, Flex};
use burn_float8::Float8;
use clap::Parser;
use device_select::SelectedDevice;
use models::Decoders;
use trainer::Job;
use trainer::cli::Command;
use trainer::job::MemoryEstimate;

use crate::common::refuses;

type Train = Float8<Autodiff<Flex>>;

const WIDE: [&str; 6] = [
    "model.overrides.hidden_size=512",
    "model.overrides.intermediate_size=1024",
    "model.overrides.num_hidden_layers=8",
    "model.overrides.vocab_size=2048",
    "training.batch_size=2",
    "training.seq_len=64",
];

fn job(config: Option<&Path>, settings: &[&str], flags: &[&str]) -> Result<Job<Decoders>, Error> {
    let mut arguments: Vec<String> = vec!["llama3".into(), "memory".into()];
    arguments.extend(config.into_iter().flat_map(|path| ["--config".into(), path.display().to_string()]));
    arguments.extend(settings.iter().flat_map(|setting| ["--set".into(), setting.to_string()]));
    arguments.extend(flags.iter().map(|flag| flag.to_string()));
    let command = Command::try_parse_from(arguments).unwrap();
    Ok(command.job::<Decoders>(&mut std::io::sink())?.expect("a job"))
}

fn estimate(settings: &[&str], ranks: usize) -> MemoryEstimate {
    let job = job(None, &[&WIDE, settings].concat(), &[]).unwrap();
    job.memory_estimate::<Train>(ranks, &SelectedDevice::Cpu, &Default::default()).unwrap()
}

/// Estimate of configs/llama3_8b.toml on a CUDA device.
fn of_8b(settings: &[&str]) -> MemoryEstimate {
    let job = job(Some(&root("configs/llama3_8b.toml")), settings, &[]).unwrap();
    job.memory_estimate::<Train>(1, &SelectedDevice::Cuda, &Default::default()).unwrap()
}

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Output of `float8 memory`.
fn told(device: &str, settings: &[&str], flags: &[&str]) -> Result<String, Error> {
    let (mut out, device) = (vec![], format!("training.device={device}"));
    let job = job(None, &[&[&*device], settings].concat(), flags)?;
    job.run::<Train>(&SelectedDevice::Cpu, &Default::default(), &mut out)?;
    Ok(String::from_utf8(out).unwrap())
}

fn row(estimate: &MemoryEstimate, name: &str) -> [u64; 4] {
    estimate.parts.iter().find(|part| part.name == name).map_or([0; 4], |part| part.bytes)
}

fn gib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 30))
}

#[test]
fn a_checkpoint_in_the_background_holds_parameters_and_moments() {
    let [plain, background, foreground] =
        [&[][..], &["checkpoint.output_dir=run"], &["checkpoint.output_dir=run", "checkpoint.background=false"]]
            .map(|settings| estimate(settings, 1));
    let [parameters, moments] = ["parameters", "AdamW's moments"].map(|name| row(&background, name)[0]);
    assert_eq!(row(&background, "checkpoint being written"), [parameters + moments; 4]);
    assert_eq!(background.peak(), plain.peak() + parameters + moments);
    assert_eq!(foreground, plain);
}

/// The errors are the ones of `train`, where a run can have them.
#[test]
fn what_does_not_fit_is_an_error() {
    let huge = [
        "training.batch_size=4294967296",
        "training.seq_len=4294967296",
        "model.overrides.max_position_embeddings=4294967296",
    ];
    assert_eq!(estimate(&huge, 1).peak(), u64::MAX, "values beyond 64 bits saturate");
    let eighty = &["--memory-gib", "80"][..];
    for (settings, flags, text) in [
        (&huge[..], eighty, "takes about more than 2^64 bytes, and there is 80.00 GiB"),
        (&huge[..2], &[], "training.seq_len = 4294967296"),
        (&["training.batch_size=0"], &[], "training.batch_size = 0"),
        (&["optimizer.in_backward=true", "training.grad_clip_norm=inf"], &[], "activation_checkpointing"),
        (&["training.freeze=['no_such']"], &[], "no_such"),
        (&["model.overrides.num_hidden_layers=8", "training.activation_checkpointing=9"], &[], "= 9: num_layers is 8"),
        (&[], &["--memory-gib", "nan"], "--memory-gib = NaN"),
        (&[], &["--memory-gib", "inf"], "--memory-gib = inf"),
        (&[], &["--memory-gib", "-5"], "--memory-gib = -5"),
        (&[], &["--memory-gib", "0"], "--memory-gib = 0"),
    ] {
        refuses(told("cpu", settings, flags), text);
    }
    told("cpu", &["model.overrides.num_hidden_layers=8", "training.activation_checkpointing=8"], &[]).unwrap();
    let unknown = told("wgpu", &[], &[]).unwrap();
    assert!(unknown.contains("how much wgpu (absent) has is unknown: --memory-gib says it"), "{unknown}");
    assert!(told("wgpu", &[], eighty).unwrap().contains("of 80.00 GiB: fits"));
}

#[test]
fn what_is_not_trained_has_no_gradient() {
    let [all, last, first, head, same] = [
        "training.freeze=[]",
        "training.freeze=['*', '!layers.7']",
        "training.freeze=['*', '!layers.0']",
        "training.freeze=['*', '!lm_head']",
        "training.freeze=['layers', 'embed_tokens', 'norm']",
    ]
    .map(|setting| estimate(&[setting], 1));
    assert_eq!(row(&last, "parameters"), row(&all, "parameters"));
    // One of eight layers is trained, and only it has a graph.
    assert_eq!(row(&last, "attention")[1], row(&all, "attention")[1] / 8);
    assert!(row(&first, "attention")[1] > 4 * row(&last, "attention")[1]);
    assert!(row(&first, "mlp")[1] < row(&all, "mlp")[1]);
    assert_eq!(row(&last, "AdamW's moments"), [2 * row(&last, "gradients")[3]; 4]);
    assert!(row(&last, "gradients")[3] * 8 < row(&all, "gradients")[3]);
    assert_eq!((row(&head, "attention"), row(&head, "gradients")[3]), ([0; 4], 4 * 512 * 2048));
    assert_eq!(head, same);
}

/// Each rank has two copies of the experts and updates only its rows.
#[test]
fn ranks_are_counted() {
    let moe = [
        "model.overrides.num_experts=4",
        "model.overrides.num_experts_per_tok=2",
        "model.overrides.tie_word_embeddings=true",
    ];
    let [one, two] = [1, 2].map(|ranks| estimate(&moe, ranks));
    let copies = |estimate| row(estimate, "FP8 copies of weights")[0];
    let codes = 2 * 8 * 4 * 3 * 512 * 1024;
    assert!((codes..codes + codes / 100).contains(&copies(&two)) && copies(&one) > copies(&two), "{two}");
    assert!(row(&two, "gathered weights")[0] > 0 && row(&one, "gathered weights")[0] == 0, "{two}");
    let [one, four] = [1, 4].map(|ranks| estimate(&[], ranks));
    assert_eq!(row(&one, "workspace")[3], 4 * row(&four, "workspace")[3]);
    assert_eq!((one.whole, four.whole), (0, row(&one, "parameters")[0]));
}

/// One byte per element of FP8 linears and two for the others of 8.03 billion. FP8-only weights
/// keep their codes, even if copies are recomputed.
#[test]
fn adapters_on_8b_in_codes_take_ten_gigabytes_of_weights() {
    let estimate = of_8b(&["lora.rank=16", "lora.base=fp8"]);
    let parameters = row(&estimate, "parameters")[0];
    let (tables, adapters) = (2 * 128_256 * 4096_u64, row(&estimate, "AdamW's moments")[0]);
    let expected = 8_030_261_248 + tables + adapters;
    assert!((parameters as f64 / expected as f64 - 1.0).abs() < 0.01, "{estimate}");
    let recomputed = of_8b(&["lora.rank=16", "lora.base=fp8", "float8.force_recompute_fp8_weight_in_bwd=true"]);
    assert_eq!(row(&recomputed, "parameters")[0], parameters);
    let docs = std::fs::read_to_string(root("docs/guide/fine-tune.md")).unwrap();
    assert!(docs.contains(&format!("has {} GiB of parameters", gib(parameters))), "{estimate}");
    assert!(docs.contains(&format!("A step takes {} GiB", gib(estimate.peak()))), "{estimate}");
}

#[test]
fn the_8b_configuration_of_eight_ranks_fits_as_documented() {
    let [header, guide] = ["configs/llama3_8b_8gpus.toml", "docs/guide/pre-train.md"]
        .map(|path| std::fs::read_to_string(root(path)).unwrap());
    let peak = |settings: &[&str]| {
        let job = job(Some(&root("configs/llama3_8b_8gpus.toml")), settings, &[]).unwrap();
        gib(job.memory_estimate::<Train>(8, &SelectedDevice::Cuda, &Default::default()).unwrap().peak())
    };
    let [freed, gathered] = [&[][..], &["parallelism.reshard=after_step"]].map(peak);
    assert!(header.contains(&format!("a rank takes {freed} GiB at most")), "{freed}");
    assert!(guide.contains(&format!("It prints a peak of {freed} GiB")), "{freed}");
    assert!(guide.contains(&format!("stay gathered: {gathered} GiB")), "{gathered}");
}

/// Figures in the header of configs/llama3_8b.toml: the first in a line is the file's, the last the
/// one with another setting.
#[test]
fn the_8b_configuration_fits_80_gib() {
    let header = std::fs::read_to_string(root("configs/llama3_8b.toml")).unwrap();
    let figures = |part: &str| -> Vec<String> {
        let line = header.lines().find(|line| line.contains(part)).unwrap_or_else(|| panic!("{part}"));
        let words = line.split_whitespace().map(|word| word.trim_end_matches([':', ',']));
        words.filter(|word| word.contains('.') && word.parse::<f64>().is_ok()).map(String::from).collect()
    };
    let saved = |settings: &[&str]| of_8b(&[&["checkpoint.output_dir=run"], settings].concat());
    let estimate = saved(&[]);
    assert!(estimate.peak() < 80 << 30);
    assert_eq!(figures("GiB at most")[0], gib(estimate.peak()), "{estimate}");
    let most = |estimate: &MemoryEstimate, parts: &[&str]| {
        let sum = |moment: usize| parts.iter().map(|part| row(estimate, part)[moment]).sum();
        gib((0..4).map(sum).max().unwrap())
    };
    let layers = &["residual stream", "attention", "mlp"][..];
    let kept = ["inputs of layers", layers[0], layers[1], layers[2]].map(|part| row(&estimate, part)[1]);
    assert_eq!(figures("inputs of 32 layers")[0], gib(kept.iter().sum()), "{estimate}");
    for (line, part) in [("FP8 copies of weights", "FP8 copies of weights"), ("512 tokens' logits", "logits")] {
        assert_eq!(figures(line)[0], most(&estimate, &[part]), "{estimate}");
    }
    for (line, moment) in [("the output's gradient", 0), ("a step of the largest parameter", 3)] {
        assert_eq!(figures(line)[0], gib(row(&estimate, "workspace")[moment]), "{estimate}");
    }
    let whole = "optimizer.in_backward=false";
    for (line, settings, parts) in [
        ("parameters in bf16", &["training.param_dtype=f32"][..], &["parameters"][..]),
        ("AdamW's moments in bf16", &["optimizer.state_dtype=f32"], &["AdamW's moments"]),
        ("#   gradients", &[whole], &["gradients"]),
        ("inputs of 32 layers", &[whole, "training.activation_checkpointing=none"], layers),
        ("512 tokens' logits", &["training.loss_chunk=8192"], &["logits"]),
        ("written in the background", &["checkpoint.background=true"], &["checkpoint being written"]),
    ] {
        let figures = figures(line);
        assert_eq!(figures[figures.len() - 1], most(&saved(settings), parts), "{line}");
        if parts.len() == 1 && figures.len() > 1 {
            assert_eq!(figures[0], most(&estimate, parts), "{line}");
        }
    }
}
