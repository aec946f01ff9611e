//! Loading: one file, shards, tied outputs, dtypes, and invalid checkpoints.

use crate::common::*;

fn load(dir: &Path) -> Result<Decoder<Flex>, Error> {
    Decoder::load_hf(dir, &Default::default())
}

fn floats(stored: &Stored) -> Vec<f32> {
    stored.bytes.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

#[test]
fn a_tied_checkpoint_needs_no_output_layer_and_may_repeat_it() {
    let config = tiny_with(|dims| dims.tie_word_embeddings = true);
    let tensors = stored_tensors(&config, 4);
    let without = load(hf_folder(&config, &tensors).path()).unwrap();
    assert!(without.lm_head.is_none());
    let mut repeated = tensors.clone();
    repeated.push(Stored { name: "lm_head.weight".into(), ..tensors[0].clone() });
    assert_eq!(named_values(&load(hf_folder(&config, &repeated).path()).unwrap()), named_values(&without));
}

/// As in merged adapters: config.json says tied, but the file has an output layer that differs from
/// the embedding.
#[test]
fn a_tied_checkpoint_with_another_output_layer_is_refused_until_one_is_chosen() {
    let tied = tiny_with(|dims| dims.tie_word_embeddings = true);
    let dir = hf_folder(&tied, &stored_tensors(&tiny(), 4));
    let told = format!(
        "{}: config.json says tie_word_embeddings = true, but lm_head.weight differs from model.embed_tokens.weight: set",
        dir.path().display()
    );
    let error = chain(load(dir.path()).unwrap_err());
    assert!(error.starts_with(&told) && error.contains("model.overrides.tie_word_embeddings"), "{error}");
    let run = |settings: &[&str]| {
        let hf = format!("model.hf_path={:?}", dir.path());
        let settings: Vec<_> = [&*hf].iter().chain(settings).map(|setting| setting.to_string()).collect();
        let config = RunConfig::load(None, &settings).unwrap();
        let dims = config.dimensions().unwrap();
        let out = &mut std::io::sink();
        let weights = Weights::open(&config, None, dims)?;
        prepare::<Decoders, Train>(&config, weights, &Default::default(), &ProgressLine::hidden(), out)
    };
    assert!(chain(run(&[]).map(drop).unwrap_err()).starts_with(&told));
    assert!(run(&["model.overrides.tie_word_embeddings=true"]).unwrap().lm_head.is_none());
    let own = run(&["model.overrides.tie_word_embeddings=false", "training.precision=f32"]).unwrap().lm_head.unwrap();
    let head = &stored_tensors(&tiny(), 4)[0];
    let transposed: Vec<f32> = values(own.weight.val().transpose());
    assert_eq!(transposed, floats(head));
}

/// The shapes do not fit, and the model would not fit in memory.
#[test]
fn shapes_are_compared_before_anything_is_allocated() {
    for huge in [
        tiny_with(|dims| {
            dims.hidden_size = 1 << 24;
            dims.head_dim = 1 << 10
        }),
        tiny_with(|dims| dims.vocab_size = 1 << 32),
    ] {
        let dir = hf_folder(&huge, &stored_tensors(&tiny(), 1));
        let error = chain(load(dir.path()).unwrap_err());
        assert!(error.contains("model.safetensors: ") && error.contains("the model needs ["), "{error}");
    }
    // The number of positions has no tensor.
    let positions = tiny_with(|dims| dims.max_seq_len = 1 << 36);
    load(hf_folder(&positions, &stored_tensors(&tiny(), 1)).path()).unwrap();
}

#[test]
fn missing_unexpected_and_misshapen_tensors_are_named() {
    let (config, tied) = (tiny(), tiny_with(|dims| dims.tie_word_embeddings = true));
    let name = "model.layers.1.mlp.down_proj.weight";
    let at = stored_tensors(&config, 6).iter().position(|stored| stored.name == name).unwrap();
    let extra = |name: &str| Stored::f32(name, &[1], &[1.0]);
    let unknown = "model.safetensors holds tensors that the model does not have: ";
    let others = ["layers.2.input_layernorm.weight", "layers.0.self_attn.q_proj.bias", "layers.0.rotary_emb.inv_freq"];
    let (others, many): (Vec<_>, Vec<_>) =
        (others.map(|name| extra(&format!("model.{name}"))).into(), (0..7).map(|i| extra(&format!("x{i}"))).collect());
    type Change<'a> = &'a dyn Fn(&mut Vec<Stored>);
    let cases: &[(Change<'_>, &str)] = &[
        (&|all| drop(all.remove(at)), " lacks the tensor model.layers.1.mlp.down_proj.weight [48, 80]"),
        (&|all| all[at].shape = vec![80, 48], "model.layers.1.mlp.down_proj.weight has shape [80, 48], "),
        (&|all| all[at].dtype = Dtype::I32, "model.layers.1.mlp.down_proj.weight has dtype I32; F32, "),
        (
            &|all| all.extend(others.clone()),
            "model.layers.0.self_attn.q_proj.bias, model.layers.2.input_layernorm.weight",
        ),
        (&|all| all.extend(many.clone()), "x0, x1, x2, x3, x4, and 2 more"),
        // An untied model needs an output layer.
        (&|all| *all = stored_tensors(&tied, 6), " lacks the tensor lm_head.weight"),
    ];
    for (change, says) in cases {
        let mut tensors = stored_tensors(&config, 6);
        change(&mut tensors);
        let error = chain(load(hf_folder(&config, &tensors).path()).unwrap_err());
        let is_unknown = tensors.len() > 21;
        assert!(error.contains(says) && error.contains(unknown) == is_unknown, "{error}");
    }
    let dir = hf_folder(&config, &stored_tensors(&config, 6));
    let error = model::<Flex>(tiny_moe(), 1).load_hf_weights(dir.path()).unwrap_err();
    assert!(error.to_string().contains("this one has 4 experts"), "{error}");
}
