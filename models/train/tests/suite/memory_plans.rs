//! Memory estimates without training: counted parts, errors, and settings that fit.

use std::path::{Path, PathBuf};

use burn::backend::{Autodiff, Flex};
use burn_float8::Float8;
use device_select::SelectedDevice;
use models::{Decoders, Error};
use train::Job;
use train::cli::parse_from;
use train::job::MemoryEstimate;

type Train = Float8<Autodiff<Flex>>;

const WIDE: [&str; 6] = [
    "model.hidden_size=512",
    "model.intermediate_size=1024",
    "model.num_layers=8",
    "model.vocab_size=2048",
    "training.batch_size=2",
    "training.seq_len=64",
];

fn job(config: Option<&Path>, settings: &[&str], flags: &[&str]) -> Result<Job<Decoders>, Error> {
    let mut arguments: Vec<String> = vec!["llama3".into(), "memory".into()];
    arguments.extend(config.map(|path| path.display().to_string()));
    for setting in settings {
        arguments.extend(["--set".into(), setting.to_string()]);
    }
    arguments.extend(flags.iter().map(|flag| flag.to_string()));
    let command = parse_from(arguments).unwrap();
    Ok(command.job::<Decoders>(&mut std::io::sink())?.expect("a job"))
}

fn estimate(settings: &[&str], ranks: usize) -> Result<MemoryEstimate, Error> {
    let job = job(None, settings, &[])?;
    Ok(job.memory_estimate::<Train>(ranks, &SelectedDevice::Cpu, &Default::default())?.expect("known"))
}

/// Output of `llama3 memory`.
fn told(settings: &[&str], flags: &[&str]) -> Result<String, Error> {
    told_of("training.device=cpu", settings, flags)
}

fn told_of(device: &str, settings: &[&str], flags: &[&str]) -> Result<String, Error> {
    let mut out = vec![];
    let settings = [&[device], settings].concat();
    job(None, &settings, flags)?.run::<Train>(&SelectedDevice::Cpu, &Default::default(), &mut out)?;
    Ok(String::from_utf8(out).unwrap())
}

fn row(estimate: &MemoryEstimate, name: &str) -> [u64; 4] {
    estimate.parts.iter().find(|part| part.name == name).map_or([0; 4], |part| part.bytes)
}

fn with<'a>(settings: &[&'a str]) -> Vec<&'a str> {
    [&WIDE[..], settings].concat()
}

#[test]
fn a_checkpoint_in_the_background_holds_parameters_and_moments() {
    let background = estimate(&with(&["checkpoint.folder=run"]), 1).unwrap();
    let [parameters, moments] = ["parameters", "AdamW's moments"].map(|name| row(&background, name)[0]);
    assert_eq!(row(&background, "checkpoint being written"), [parameters + moments; 4]);
    let plain = estimate(&WIDE, 1).unwrap();
    assert_eq!(background.peak(), plain.peak() + parameters + moments);
    let foreground = estimate(&with(&["checkpoint.folder=run", "checkpoint.background=false"]), 1).unwrap();
    assert_eq!(foreground, plain);
}

#[test]
fn what_exceeds_64_bits_is_never_little() {
    let huge = ["training.batch_size=4294967296", "training.seq_len=4294967296", "model.max_seq_len=4294967296"];
    assert_eq!(estimate(&huge, 1).unwrap().peak(), u64::MAX);
    let error = told(&huge, &["--available", "80"]).unwrap_err();
    assert!(matches!(error, Error::StepMemory { .. }), "{error}");
    // The same errors as in `train`.
    let error = told(&huge[..2], &[]).unwrap_err().to_string();
    assert!(error.contains("training.seq_len = 4294967296"), "{error}");
    let error = told(&["training.batch_size=0"], &[]).unwrap_err().to_string();
    assert!(error.contains("training.batch_size = 0"), "{error}");
    let in_backward = ["optimizer.in_backward=true", "training.max_norm=inf"];
    assert!(told(&in_backward, &[]).unwrap_err().to_string().contains("activation_checkpointing"));
}

#[test]
fn what_is_not_trained_has_no_gradient() {
    let all = estimate(&WIDE, 1).unwrap();
    let some = |settings: &[&str]| estimate(&with(settings), 1).unwrap();
    let last = some(&["training.train_only=['layers.7']"]);
    let first = some(&["training.train_only=['layers.0']"]);
    assert_eq!(row(&last, "parameters"), row(&all, "parameters"));
    // One of eight layers is trained, and only it has a graph.
    assert_eq!(row(&last, "attention")[1], row(&all, "attention")[1] / 8);
    assert!(row(&first, "attention")[1] > 4 * row(&last, "attention")[1]);
    assert!(row(&first, "mlp")[1] < row(&all, "mlp")[1]);
    assert_eq!(row(&last, "AdamW's moments"), row(&last, "gradients").map(|_| 2 * row(&last, "gradients")[3]));
    assert!(row(&last, "gradients")[3] * 8 < row(&all, "gradients")[3]);
    let head = some(&["training.train_only=['lm_head']"]);
    assert_eq!((row(&head, "attention"), row(&head, "gradients")[3]), ([0; 4], 4 * 512 * 2048));
    assert_eq!(some(&["training.freeze=['layers', 'embed_tokens', 'norm']"]), head);
    assert!(told(&["training.freeze=['no_such']"], &[]).unwrap_err().to_string().contains("no_such"));
}

#[test]
fn experts_have_two_copies_on_every_rank() {
    let moe = ["model.moe.num_experts=4", "model.moe.num_experts_per_tok=2", "model.tie_word_embeddings=true"];
    let copies = |settings: &[&str], ranks| row(&estimate(&with(settings), ranks).unwrap(), "FP8 copies of weights")[0];
    let (experts, ranks) = (copies(&moe, 1), copies(&moe, 2));
    let codes = 2 * 8 * 4 * 3 * 512 * 1024;
    assert!((codes..codes + codes / 100).contains(&ranks), "{ranks} of {codes}");
    assert!(experts > ranks);
    let two = estimate(&with(&moe), 2).unwrap();
    assert!(
        row(&two, "gathered weights")[0] > 0 && row(&estimate(&with(&moe), 1).unwrap(), "gathered weights")[0] == 0
    );
    // A rank updates only its rows.
    let update = |ranks| row(&estimate(&WIDE, ranks).unwrap(), "workspace")[3];
    assert_eq!(update(1), 4 * update(4));
}

#[test]
fn checkpointing_of_more_layers_than_there_are_is_refused() {
    for (layers, fits) in [("8", true), ("9", false)] {
        let every = format!("training.activation_checkpointing={layers}");
        let told = told(&with(&[&every]), &[]);
        assert_eq!(told.is_ok(), fits, "{layers}");
        if let Err(error) = told {
            assert!(error.to_string().contains("activation_checkpointing = 9: num_layers is 8"), "{error}");
        }
    }
}

#[test]
fn a_device_that_is_not_here_has_an_unknown_memory() {
    let unknown = told_of("training.device=wgpu", &[], &[]).unwrap();
    assert!(unknown.contains("how much wgpu (absent) has is unknown: --available says it"), "{unknown}");
    assert!(told_of("training.device=wgpu", &[], &["--available", "80"]).unwrap().contains("of 80.00 GiB: fits"));
}

#[test]
fn what_is_no_amount_of_memory_is_refused() {
    for available in ["nan", "inf", "-5", "0"] {
        let Err(error) = job(None, &[], &["--available", available]) else { panic!("{available} is taken") };
        let error = error.to_string();
        assert!(error.to_lowercase().contains(&format!("--available = {available}")), "{error}");
    }
    assert!(told(&[], &["--available", "80"]).unwrap().contains("of 80.00 GiB: fits"));
}

fn the_8b_configuration() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../configs/llama3_8b.toml")
}

/// As stated in docs/lora.md: one byte per element of FP8 linears and two for the others of 8.03
/// billion.
#[test]
fn adapters_on_8b_in_codes_take_ten_gigabytes_of_weights() {
    let job = job(Some(&the_8b_configuration()), &["lora.rank=16", "lora.base=fp8"], &[]).unwrap();
    let estimate = job.memory_estimate::<Train>(1, &SelectedDevice::Cuda, &Default::default()).unwrap().expect("known");
    let parameters = row(&estimate, "parameters")[0];
    let (tables, adapters) = (2 * 128_256 * 4096_u64, row(&estimate, "AdamW's moments")[0]);
    let codes = 8_030_261_248 - tables;
    assert!((parameters as f64 / (codes + 2 * tables + adapters) as f64 - 1.0).abs() < 0.01, "{estimate}");
    assert!(parameters < 10_000_000_000, "{estimate}");
    // FP8-only weights keep their codes, even if copies are recomputed.
    let settings = ["lora.rank=16", "lora.base=fp8", "float8.force_recompute_fp8_weight_in_bwd=true"];
    let recomputed = self::job(Some(&the_8b_configuration()), &settings, &[]).unwrap();
    let recomputed = recomputed.memory_estimate::<Train>(1, &SelectedDevice::Cuda, &Default::default()).unwrap();
    assert_eq!(row(&recomputed.expect("known"), "parameters")[0], parameters);
    let docs = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/lora.md");
    let docs = std::fs::read_to_string(docs).unwrap();
    let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30));
    assert!(docs.contains(&format!("has {} of parameters", gib(parameters))), "{estimate}");
    assert!(docs.contains(&format!("A step takes {}", gib(estimate.peak()))), "{estimate}");
}

/// Figures in the file's header.
#[test]
fn the_8b_configuration_fits_80_gib() {
    let path = the_8b_configuration();
    let header = std::fs::read_to_string(&path).unwrap();
    let job = job(Some(&path), &["checkpoint.folder=run"], &[]).unwrap();
    let estimate = job.memory_estimate::<Train>(1, &SelectedDevice::Cuda, &Default::default()).unwrap().expect("known");
    let gib = |bytes: u64| format!("{:.1}", bytes as f64 / f64::from(1 << 30));
    let most = |name: &str| row(&estimate, name).into_iter().max().unwrap();
    assert!(header.contains(&format!("a step takes {} GiB at most", gib(estimate.peak()))), "{estimate}");
    let figure = |line: &str| {
        let line = header.lines().find(|text| text.contains(line)).unwrap_or_else(|| panic!("{line}"));
        line.split_whitespace().find(|word| word.contains('.') && word.parse::<f64>().is_ok()).unwrap().to_string()
    };
    let layers = ["inputs of layers", "residual stream", "attention", "mlp"].map(|name| row(&estimate, name)[1]);
    for (line, bytes) in [
        ("parameters in bf16", most("parameters")),
        ("AdamW's moments in bf16", most("AdamW's moments")),
        ("FP8 copies of weights", most("FP8 copies of weights")),
        ("#   gradients", most("gradients")),
        ("inputs of 32 layers", layers.iter().sum()),
        ("512 tokens' logits", most("logits")),
        ("the output's gradient", row(&estimate, "workspace")[0]),
        ("a step of the largest parameter", row(&estimate, "workspace")[3]),
    ] {
        assert_eq!(figure(line), gib(bytes), "{line}\n{estimate}");
    }
    assert!(estimate.peak() < 80 << 30);
    // Last figure in a line of the header: the memory with that change.
    let otherwise = |line: &str| {
        let line = header.lines().find(|text| text.contains(line)).unwrap_or_else(|| panic!("{line}"));
        let mut figures = line.split_whitespace().filter(|word| word.contains('.')).filter_map(|word| {
            let word = word.trim_end_matches([':', ',']);
            word.parse::<f64>().is_ok().then(|| word.to_string())
        });
        figures.next_back().unwrap()
    };
    let without = "optimizer.in_backward=false";
    let cases: [(&str, &[&str], &[&str]); 6] = [
        ("parameters in bf16", &["training.param_dtype=f32"], &["parameters"]),
        ("AdamW's moments in bf16", &["optimizer.state_dtype=f32"], &["AdamW's moments"]),
        ("#   gradients", &[without], &["gradients"]),
        (
            "inputs of 32 layers",
            &[without, "training.activation_checkpointing=none"],
            &["residual stream", "attention", "mlp"],
        ),
        ("512 tokens' logits", &["training.loss_chunk=8192"], &["logits"]),
        ("written in the background", &["checkpoint.background=true"], &["checkpoint being written"]),
    ];
    for (line, settings, parts) in cases {
        let job = self::job(Some(&path), &[&["checkpoint.folder=run"], settings].concat(), &[]).unwrap();
        let estimate = job.memory_estimate::<Train>(1, &SelectedDevice::Cuda, &Default::default()).unwrap();
        let estimate = estimate.expect("known");
        let bytes = (0..4).map(|moment| parts.iter().map(|part| row(&estimate, part)[moment]).sum::<u64>());
        assert_eq!(otherwise(line), gib(bytes.max().unwrap()), "{line}\n{estimate}");
    }
}
