//! Host memory of an import and of an FP8 export, each measured in a separate process. With Flex the
//! model is in host memory too.

use crate::common::*;
use crate::float8_exports::export;

const VARIABLE: &str = "FLOAT8_TEST_IMPORT";
const TEST: &str = "import_memory::import_needs_the_model_and_two_tensors";

/// Three weights of 36 MB and small ones.
fn wide() -> DecoderConfig {
    tiny_with(|dims| {
        *dims = Dimensions {
            vocab_size: 288,
            hidden_size: 1024,
            intermediate_size: 8704,
            num_layers: 1,
            num_heads: 8,
            num_kv_heads: 2,
            head_dim: 64,
            ..*dims
        };
    })
}

#[test]
fn import_needs_the_model_and_two_tensors() {
    if let Some(folder) = env::var_os(VARIABLE) {
        return measure(Path::new(&folder));
    }
    for dtype in [Dtype::F32, Dtype::BF16] {
        let dir = tempfile::tempdir().unwrap();
        let config = wide();
        write_json(&dir.path().join("config.json"), &hf_json(&config));
        let tensor = |(name, shape): (String, Vec<usize>)| {
            let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            NewTensor { name, dtype, shape, bytes: Box::new(move || Ok(vec![0x3c; bytes])) }
        };
        let tensors: Vec<_> = tensor_shapes(&config).into_iter().map(tensor).collect();
        write_shards(dir.path(), &tensors, 60_000_000).unwrap();
        run_alone(TEST, VARIABLE, dir.path());
    }
    // FP8 weights are made, and decoded, one by one.
    for recipe in [Recipe::Tensorwise, Recipe::Mxfp8] {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join(recipe.to_string());
        run_alone(TEST, VARIABLE, &folder);
        run_alone(TEST, VARIABLE, &folder);
    }
}

/// Imports the folder, or exports it by the recipe of its name if it is not there yet.
fn measure(folder: &Path) {
    let config = wide();
    let tensor = config.dims.hidden_size * config.dims.intermediate_size * 4;
    let parameters = config.dims.num_params() * 4;
    if folder.exists() {
        let before = status("VmRSS:");
        let model = Decoder::<Flex>::load_hf(folder, &Default::default()).unwrap();
        let more = status("VmHWM:") - before;
        assert_eq!(model.num_params(), config.dims.num_params());
        println!("model: {parameters}, its largest tensor: {tensor}, peak: {more}");
        assert!(more >= parameters, "the model itself was not seen");
        assert!(more <= parameters + 2 * tensor, "{more} bytes for a model of {parameters} and tensors of {tensor}");
        return;
    }
    let model = model::<Flex>(config, 1);
    // Excludes the peak of initializing the model.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status("VmRSS:");
    export(&model, folder.file_name().unwrap().to_str().unwrap().parse().unwrap(), folder).unwrap();
    let more = status("VmHWM:") - before;
    println!("largest tensor: {tensor}, peak: {more}");
    assert!(more >= tensor, "the tensor that was read was not seen");
    assert!(more <= 2 * tensor, "{more} bytes for tensors of {tensor}");
}

/// Memory of this process in bytes, including pages of files: the current or the peak value, by
/// `key`.
fn status(key: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() * 1024
}
