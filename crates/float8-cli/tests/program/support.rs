//! Starts the program; small models and texts for it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

pub(crate) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_float8"));
    // Folder of the token cache.
    command.args(arguments).env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command
}

pub(crate) fn float8(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

pub(crate) fn stdout(output: &Output) -> &str {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    str::from_utf8(&output.stdout).unwrap()
}

pub(crate) fn stderr(output: &Output) -> &str {
    assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    str::from_utf8(&output.stderr).unwrap()
}

/// Tokenizer in Hugging Face's format with 1001 ids.
pub(crate) fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../trainer/tests/vectors")
}

pub(crate) fn file(name: &str, text: &str) -> (TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    (folder, path.display().to_string())
}

/// Text that a small model can learn.
pub(crate) fn text() -> (TempDir, String) {
    file("text.rs", &"fn main() { println!(\"one, two, three\"); }\n".repeat(400))
}

/// Adds `--set` before each setting.
pub(crate) fn set(settings: &[&str]) -> Vec<String> {
    settings.iter().flat_map(|setting| ["--set".into(), setting.to_string()]).collect()
}

/// Arguments for a run of a small model on `data`: one layer, sequences of 16 tokens.
pub(crate) fn small(data: &str, settings: &[&str]) -> Vec<String> {
    small_on("cpu", data, settings)
}

/// The same on a device.
pub(crate) fn small_on(device: &str, data: &str, settings: &[&str]) -> Vec<String> {
    let model = "model.overrides={ vocab_size = 1008, num_hidden_layers = 1, hidden_size = 32, intermediate_size = 64, \
                 num_attention_heads = 2, num_key_value_heads = 1, head_dim = 16 }";
    let run = ["training.seq_len=16", "training.batch_size=2", "training.eval_batches=2", "training.log_every=1"];
    let others = ["data.validation_split=0.1", "generate.max_new_tokens=4", model];
    let fixed = ["--device", device, "--data", data].map(String::from);
    [&fixed[..], &set(&[&run[..], &others, settings].concat())].concat()
}

/// Copies the content of a folder.
#[cfg(unix)]
pub(crate) fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        if path.is_dir() { copy(&path, &to) } else { std::fs::copy(&path, &to).map(drop).unwrap() }
    }
}

pub(crate) fn train(arguments: &[String]) -> Command {
    let mut command = command(&["train"]);
    command.args(arguments);
    command
}

/// Whether there is a wgpu adapter, possibly a software one. If not, prints that the test is
/// skipped.
pub(crate) fn has_wgpu() -> bool {
    let adapters = device_select::wgpu_adapters().expect("wgpu is compiled in");
    if adapters.is_empty() {
        test_data::skip(test_data::VULKAN);
    }
    !adapters.is_empty()
}

/// Runs a script of this folder on `argument`, with the Python `FLOAT8_PYTHON`. Without it, prints
/// that the script is skipped.
pub(crate) fn python(script: &str, packages: &str, argument: &Path) {
    let Some(python) = std::env::var_os("FLOAT8_PYTHON") else {
        return test_data::skip_optional(&format!("FLOAT8_PYTHON, a Python with {packages}"));
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/program").join(script);
    stdout(&Command::new(python).arg(script).arg(argument).output().unwrap());
}
