//! Host memory of an FP8 export, measured in a separate process. With Flex the model is in host
//! memory too.

use std::env;
use std::path::Path;

use burn::backend::Flex;
use burn_float8::Recipe;
use models::Decoder;

use crate::common::{model, run_alone};
use crate::float8_exports::export;
use crate::import_memory::{status, wide};

const VARIABLE: &str = "FLOAT8_TEST_EXPORT";

#[test]
fn export_in_fp8_needs_two_tensors_beside_the_model() {
    if let Some(folder) = env::var_os(VARIABLE) {
        let folder = Path::new(&folder);
        let recipe: Recipe = folder.file_name().unwrap().to_str().unwrap().parse().unwrap();
        return measure(recipe, folder);
    }
    for recipe in [Recipe::Tensorwise, Recipe::Rowwise, Recipe::Mxfp8] {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join(recipe.to_string());
        let test = "export_memory::export_in_fp8_needs_two_tensors_beside_the_model";
        run_alone(test, VARIABLE, &folder, None);
    }
}

fn measure(recipe: Recipe, folder: &Path) {
    let config = wide();
    let tensor = config.dims.hidden_size * config.dims.intermediate_size * 4;
    let model: Decoder<Flex> = model(config, 1);
    // Excludes the peak of initializing the model.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status("VmRSS:");
    export(&model, recipe, folder).unwrap();
    let more = status("VmHWM:") - before;
    println!("{recipe}: the largest tensor: {tensor}, peak: {more}");
    assert!(more >= tensor, "the tensor that was read was not seen");
    assert!(more <= 2 * tensor, "{more} bytes for tensors of {tensor}");
    drop(model);
}
