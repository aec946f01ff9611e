//! Memory estimates without training: counted parts, errors, and figures of the documentation.

use crate::common::*;

const WIDE: [&str; 3] = [
    "model.overrides={ hidden_size = 512, intermediate_size = 1024, num_hidden_layers = 8, vocab_size = 2048 }",
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

/// The errors are the ones of `train`, where a run can have them. A row has settings, flags and the
/// text of the error, if there is one.
#[test]
fn what_does_not_fit_is_an_error() {
    for (settings, flags, says) in table::<(Vec<String>, Vec<String>, String)>("refusals/memory") {
        let [settings, flags] = [&settings, &flags].map(|list| list.iter().map(String::as_str).collect::<Vec<_>>());
        match told("cpu", &settings, &flags) {
            Ok(_) => assert!(says.is_empty(), "{says}"),
            Err(error) => assert!(!says.is_empty() && error.to_string().contains(&says), "{error}"),
        }
    }
    let huge = 1_u64 << 32;
    let sizes = ["training.batch_size", "training.seq_len", "model.overrides.max_position_embeddings"];
    let sizes = sizes.map(|key| format!("{key}={huge}"));
    assert_eq!(estimate(&sizes.each_ref().map(String::as_str), 1).peak(), u64::MAX, "values beyond 64 bits saturate");
    let unknown = told("wgpu", &[], &[]).unwrap();
    assert!(unknown.contains("how much wgpu (absent) has is unknown: --memory-gib says it"), "{unknown}");
    assert!(told("wgpu", &[], &["--memory-gib", "80"]).unwrap().contains("of 80.00 GiB: fits"));
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
    // In backward, a layer's gradients are gone before the next layer has any.
    let in_backward = |layers: &str| {
        let mode = format!("training.activation_checkpointing={layers}");
        estimate(&["optimizer.in_backward=true", "training.grad_clip_norm=inf", &mode], 1)
    };
    let [whole, one, three] = [&all, &in_backward("full"), &in_backward("3")]
        .map(|e| row(e, "gradients"))
        .map(|bytes| bytes.into_iter().max().unwrap());
    assert!(one < whole / 2 && three - one == 2 * (whole - one) / 7, "{whole} {one} {three}");
}

/// Each rank has two copies of the experts, or of its experts, and updates only its rows.
#[test]
fn ranks_are_counted() {
    let experts = ["model.overrides.num_experts=4", "model.overrides.num_experts_per_tok=2"];
    let moe = [experts[0], experts[1], "model.overrides.tie_word_embeddings=true"];
    let [one, two] = [1, 2].map(|ranks| estimate(&moe, ranks));
    let copies = |estimate| row(estimate, "FP8 copies of weights")[0];
    let codes = 2 * 8 * 4 * 3 * 512 * 1024;
    assert!((codes..codes + codes / 100).contains(&copies(&two)) && copies(&one) > copies(&two), "{two}");
    let half = estimate(&[&moe[..], &["parallelism.experts=true"]].concat(), 2);
    // Each weight has a scale.
    assert!((copies(&two)..copies(&two) + 1000).contains(&(2 * copies(&half))), "{half}");
    assert!(row(&half, "parameters")[0] < row(&two, "parameters")[0], "{half}");
    assert!(row(&two, "gathered weights")[0] > 0 && row(&one, "gathered weights")[0] == 0, "{two}");
    // Shards, or parts, of FP8-only weights beside whole adapters.
    let [one, shards, parts] = [(1, 1), (2, 1), (2, 2)].map(|(ranks, tensor)| {
        let tensor = format!("parallelism.tensor={tensor}");
        let estimate = estimate(&["lora.rank=4", "lora.base=fp8", &tensor], ranks);
        (row(&estimate, "parameters")[0] - row(&estimate, "AdamW's moments")[0] / 2) as f64
    });
    assert!(
        (2.0 * shards / one - 1.0).abs() < 0.01 && (2.0 * parts / one - 1.0).abs() < 0.01,
        "{one} {shards} {parts}"
    );
    let [one, four] = [1, 4].map(|ranks| estimate(&[], ranks));
    assert_eq!(row(&one, "workspace")[3], 4 * row(&four, "workspace")[3]);
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
    is_documented("docs/guide/fine-tune.md", "has % GiB of parameters", parameters);
    is_documented("docs/guide/fine-tune.md", "A step takes % GiB", estimate.peak());
}

/// Requires this text with a number of GiB in a file.
fn is_documented(path: &str, text: &str, bytes: u64) {
    let text = text.replace('%', &gib(bytes));
    assert!(std::fs::read_to_string(root(path)).unwrap().contains(&text), "{path} lacks: {text}");
}

#[test]
fn configurations_of_several_gpus_fit_as_documented() {
    let peak_of = |config: &str, ranks: usize, settings: &[&str]| {
        let fixed = ["checkpoint.output_dir=run", "data.tokenizer=bytes"];
        let job = job(Some(&root(config)), &[&fixed, settings].concat(), &[]).unwrap();
        job.memory_estimate::<Train>(ranks, &SelectedDevice::Cuda, &Default::default()).unwrap().peak()
    };
    let peak = |settings: &[&str]| peak_of("configs/llama3_8b_8gpu.toml", 8, settings);
    let replicas = ["parallelism.replicate=2", "parallelism.shard=4"];
    let [freed, gathered, replicated] = [&[][..], &["parallelism.reshard=after_step"], &replicas].map(peak);
    is_documented("configs/llama3_8b_8gpu.toml", "a rank takes % GiB", freed);
    let config = "configs/mistral_7b_16gpu.toml";
    is_documented(config, "a rank takes % GiB", peak_of(config, 16, &[]));
    let config = "configs/llama3_70b_64gpu.toml";
    let parts = peak_of(config, 64, &[]);
    is_documented(config, "a rank takes % GiB", parts);
    assert!(freed.max(gathered).max(replicated).max(parts) < 80_000_000_000);
    // Twice the parts instead of shards: less of the hidden states and the head on each rank.
    assert!(peak_of(config, 64, &["parallelism.shard=64", "parallelism.tensor=1"]) > parts);
    is_documented("docs/guide/pre-train.md", "by 4 ranks: % GiB", replicated);
    is_documented("docs/guide/pre-train.md", "The peak is % GiB", freed);
    is_documented("docs/guide/pre-train.md", "stay gathered: % GiB", gathered);
    // On one device: the estimate and its parts.
    let header = std::fs::read_to_string(root("configs/llama3_8b.toml")).unwrap();
    let estimate = of_8b(&["checkpoint.output_dir=run"]);
    assert!(estimate.peak() < 80 << 30);
    let has = |begin: &str, bytes: u64| {
        let line = header.lines().find(|line| line.contains(begin)).unwrap();
        assert!(line.split_whitespace().any(|word| word == gib(bytes)), "{line}\n{estimate}");
    };
    has("GiB at most", estimate.peak());
    for part in ["parameters", "AdamW's moments", "FP8 copies of weights", "gradients"] {
        has(&format!("#   {part}"), row(&estimate, part).into_iter().max().unwrap());
    }
}
