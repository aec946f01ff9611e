//! Runs whose ranks divide each linear: `parallelism.tensor`.

use crate::ranks::{Runs, float8, losses};
use crate::support::{command, set, small, stderr, stdout};

/// Eight heads and four key heads. Four ranks have whole parts of all sizes.
pub(crate) const MODEL: [&str; 2] = [
    "model.overrides={ vocab_size = 1024, num_hidden_layers = 2, hidden_size = 128, intermediate_size = 256, \
     num_attention_heads = 8, num_key_value_heads = 4, head_dim = 16 }",
    "training.seq_len=64",
];

/// Settings of replicas, shards and parts.
pub(crate) fn mesh([replicate, shard, tensor]: [usize; 3]) -> [String; 3] {
    [
        format!("parallelism.replicate={replicate}"),
        format!("parallelism.shard={shard}"),
        format!("parallelism.tensor={tensor}"),
    ]
}

/// Gradient norms of the steps.
fn norms(text: &str) -> Vec<f64> {
    let of = |line: &str| line.split_once("grad_norm: ")?.1.split_whitespace().next()?.parse().ok();
    text.lines().filter_map(of).collect()
}

fn near(found: &[f64], expected: &[f64], bound: f64, what: &str) {
    assert!(!found.is_empty() && found.len() == expected.len(), "{what}: {found:?} and {expected:?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= bound * expected, "{what}: {found} and {expected}");
    }
}

/// One process has the same losses and gradient norms as any mesh.
#[test]
fn a_mesh_of_parts_is_one_rank() {
    let runs = Runs::new();
    for (settings, updates_early, bound) in [
        (&["training.precision=f32", "training.grad_clip_norm=0.5"][..], false, 1e-5),
        (&["float8.recipe=delayed", "training.activation_checkpointing=full"], true, 2e-3),
        (
            &["float8.recipe=rowwise_with_gw_hp", "training.loss_chunk=16", "parallelism.reshard=after_forward"],
            false,
            2e-3,
        ),
    ] {
        let train = |parts: [usize; 3]| {
            let (readers, mesh) = (parts[0] * parts[1], mesh(parts));
            let accumulation = format!("training.grad_accumulation={}", 2 / readers);
            let clip = "training.grad_clip_norm=inf";
            // Only with one micro-batch a step.
            let in_backward = format!("optimizer.in_backward={}", updates_early && readers == 2);
            let settings = [
                &MODEL[..],
                &["training.steps=3", clip, &accumulation, &in_backward],
                settings,
                &mesh.each_ref().map(|s| &**s),
            ];
            let output = float8(readers * parts[2], "train", &small(runs.text(), &settings.concat()));
            (losses(&output), norms(stdout(&output)), stdout(&output).contains("sample: left out: ranks of tensor"))
        };
        let one = train([1, 1, 1]);
        for parts in [[1, 1, 4], [1, 2, 2], [2, 1, 2]] {
            let found = train(parts);
            near(&found.0, &one.0, bound, &format!("losses of {settings:?} {parts:?}"));
            near(&found.1, &one.1, 10.0 * bound.max(1e-4), &format!("norms of {settings:?} {parts:?}"));
            assert!(found.2 && !one.2);
        }
    }
}

/// A checkpoint of any mesh is resumed by any other, one process included.
#[test]
fn a_run_goes_on_with_other_parts() {
    let runs = Runs::new();
    let (f32, delayed) = (("training.precision=f32", 1e-5), ("float8.recipe=delayed", 3e-3));
    for (begun, others, (precision, bound)) in [
        ([1, 2, 2], &[[1, 2, 2], [1, 1, 4], [2, 1, 2], [1, 2, 1], [1, 1, 1]][..], delayed),
        ([1, 2, 2], &[[1, 2, 2], [2, 1, 2], [1, 1, 1]], f32),
        ([1, 1, 4], &[[1, 1, 1], [1, 2, 2]], f32),
        ([1, 1, 1], &[[1, 2, 2]], f32),
    ] {
        let count = |parts: [usize; 3]| parts.into_iter().product::<usize>();
        let accumulation = |parts: [usize; 3]| format!("training.grad_accumulation={}", 2 / (parts[0] * parts[1]));
        let name = format!("run of {begun:?} with {precision}");
        let [every, folder] = runs.saved(&name);
        let (mesh_of_run, of_run) = (mesh(begun), accumulation(begun));
        let settings = ["training.steps=4", precision, &of_run, &every, &folder];
        let settings = [&MODEL[..], &settings, &mesh_of_run.each_ref().map(|s| &**s)].concat();
        let all = losses(&float8(count(begun), "train", &small(runs.text(), &settings)));
        for &parts in others {
            let (mesh, accumulation) = (mesh(parts), accumulation(parts));
            let settings = [&mesh.each_ref().map(|s| &**s)[..], &[&accumulation]].concat();
            let resumed = runs.resume_with(count(parts), &name, &settings);
            let bound = if parts == begun { 0.0 } else { bound };
            near(&resumed, &all[2..], bound, &format!("{begun:?} as {parts:?}"));
        }
    }
}

/// Adapters on values and on FP8-only weights have the losses of one process. Their checkpoints are
/// resumed by other meshes, one process included.
#[test]
fn adapters_of_parts_are_those_of_one_rank() {
    let runs = Runs::new();
    let on_codes = [
        "lora.base=fp8",
        "float8.recipe=rowwise",
        "training.param_dtype=bf16",
        "lora.target_modules=['all-linear', 'lm_head']",
    ];
    for (settings, bound) in [
        (&["training.precision=f32", "lora.dropout=0.1"][..], 1e-5),
        (&[&on_codes[..], &["training.activation_checkpointing=full", "training.loss_chunk=16"]].concat(), 2e-3),
    ] {
        let lora = ["training.steps=4", "lora.rank=4", "optimizer.lr=1e-2"];
        let train = |parts: [usize; 3], more: &[&str]| {
            let (mesh, accumulation) = (mesh(parts), format!("training.grad_accumulation={}", 2 / parts[1]));
            let settings = [&MODEL[..], &lora, settings, &mesh.each_ref().map(|s| &**s), &[&accumulation], more];
            losses(&float8(parts.into_iter().product(), "train", &small(runs.text(), &settings.concat())))
        };
        let one = train([1, 1, 1], &[]);
        for parts in [[1, 2, 1], [1, 1, 2], [1, 2, 2]] {
            let name = format!("{} {parts:?}", settings[0]);
            let [every, folder] = runs.saved(&name);
            let all = train(parts, &[&every, &folder]);
            near(&all, &one, bound, &name);
            if parts[2] == 2 {
                let resumed = runs.resume_with(
                    1,
                    &name,
                    &["parallelism.shard=1", "parallelism.tensor=1", "training.grad_accumulation=2"],
                );
                near(&resumed, &all[2..], bound, &name);
            }
        }
    }
}

/// Adapters of attention, beside experts that ranks divide.
#[test]
fn adapters_beside_divided_experts() {
    let runs = Runs::new();
    let [one, two] = [1, 2].map(|ranks| {
        let settings = ["training.steps=3", "model.preset=llama3-debug-moe", "parallelism.experts=true"];
        let accumulation = format!("training.grad_accumulation={}", 2 / ranks);
        let lora = ["lora.rank=4", "lora.base=fp8", "optimizer.lr=1e-2", &accumulation];
        losses(&float8(ranks, "train", &small(runs.text(), &[&settings[..], &lora].concat())))
    });
    near(&two, &one, 2e-3, "experts");
}

/// One process evaluates and exports what parts have saved: a model, and adapters.
#[test]
fn what_parts_have_saved_is_read() {
    let runs = Runs::new();
    for (name, settings) in [("model", &[][..]), ("adapters", &["lora.rank=4", "lora.base=fp8", "optimizer.lr=1e-2"])] {
        let [_, folder] = runs.saved(name);
        let settings =
            [&MODEL[..], &["training.steps=2", "parallelism.tensor=2", "parallelism.shard=1", &folder], settings];
        let output = float8(2, "train", &small(runs.text(), &settings.concat()));
        assert_eq!(stdout(&output).contains("FP8-only weights: 14 linears"), name == "adapters");
        let all = losses(&output);
        near(&losses(&float8(1, "eval", &[runs.path(name)])), &all[2..], 2e-3, name);
        let hf = runs.path(&format!("{name}-hf"));
        let merged = (name == "adapters").then(|| "--merge-adapters".into());
        let arguments = [runs.path(name), "--output".into(), hf.clone(), "--format".into(), "f32".into()];
        stdout(&float8(1, "export", &arguments.into_iter().chain(merged).collect::<Vec<_>>()));
        let text = ["data.tokenizer=bytes", "training.seq_len=64", "training.batch_size=2", "training.eval_batches=2"];
        let [run, exported] = [runs.path(name), hf].map(|model| {
            let data = ["--device", "cpu", "--precision", "f32", "--data", runs.text()].map(String::from);
            losses(&float8(1, "eval", &[&[model][..], &data, &set(&text)].concat()))
        });
        near(&exported, &run, 1e-4, name);
    }
    // Ranks read their rows of the codes of a folder in FP8.
    let arguments = [&runs.path("model"), "--output", &runs.path("fp8"), "--format", "fp8", "--recipe", "rowwise"];
    stdout(&float8(1, "export", &arguments.map(String::from)));
    let settings = ["training.steps=3", "lora.rank=4", "lora.base=fp8", "float8.recipe=rowwise"];
    let [one, two] = [1, 2].map(|ranks| runs.fine_tune("fp8", [ranks, 2], &settings));
    near(&two, &one, 2e-3, "a folder in FP8");
}

/// Errors before the first step, and of `memory`, name the key of a size that ranks do not divide.
#[test]
fn parts_that_are_not_whole_are_refused() {
    let runs = Runs::new();
    let heads = "model.overrides={ vocab_size = 1024, num_attention_heads = 8, num_key_value_heads = 2 }";
    for (settings, says) in [
        (&[heads][..], "parallelism.tensor = 4: does not divide the model's num_key_value_heads, 2"),
        (&["training.seq_len=48"], "training.seq_len = 48: must be a multiple of 64"),
        (
            &["float8.recipe=mxfp8"],
            "parallelism.tensor = 4: layers. .. which 4 ranks do not divide into multiples of 128",
        ),
        (&["parallelism.experts=true"], "parallelism.experts = true: the model has no experts"),
        (&["parallelism.shard=2"], "shard = 2 and tensor = 4 do not make 4 ranks"),
    ] {
        let settings = [&MODEL[..], &["training.steps=1", "parallelism.tensor=4"], settings].concat();
        let arguments = small(runs.text(), &settings);
        let mut memory = command(&["memory", "--ranks", "4", "--device", "cpu"]);
        // It reads no data.
        for failed in [float8(4, "train", &arguments), memory.args(&arguments[4..]).output().unwrap()] {
            assert!(says.split(" .. ").all(|text| stderr(&failed).contains(text)), "{says}: {}", stderr(&failed));
            assert!(!stderr(&failed).contains("panicked"), "{}", stderr(&failed));
        }
    }
}
