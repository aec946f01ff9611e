//! Smoke test of every row of `float8-gpu` on wgpu, in small shapes and with the options of
//! `run.sh`. It checks that results are complete, not how long they took.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

/// Mock of the torch module: every call succeeds, and any two events are two milliseconds apart.
const TORCH: &str = r#"
import sys
from unittest.mock import MagicMock

torch = MagicMock(__version__="2.x")
torch.cuda.is_available.return_value = True
torch.cuda.get_device_name.return_value = "none"
torch.cuda.Event.return_value.elapsed_time.return_value = 2.0
sys.modules[__name__] = torch
"#;

/// Long limits, as slow machines are not hangs.
const LIMITS: [&str; 4] = ["--limit-seconds", "3000", "--case-seconds", "1000"];

/// One check of each kind.
const CHECKS: [&str; 19] = [
    "golden_cast e4m3 bf16",
    "golden_scale e4m3",
    "golden_codes f32_e4m3_tensorwise",
    "golden_mx f32_e4m3_floor",
    "golden_linear tensorwise",
    "quantize 37x140 f32 row-major values e4m3 1x128 F32",
    "quantize_with_amax 70x133 f32 row-major values e4m3 tensorwise F32 Rows",
    "scale e4m3 tensorwise",
    "encode f32 e4m3",
    "dequantize_mx 1x1 e4m3",
    "swiglu 3x17 f32 row-major",
    "rms_norm 70x96 f32 row-major by f32",
    "rotary 2x7x3x10 f32",
    "amax 1x1 bf16",
    "health 1x1 bf16",
    "scaled_gemm 1x1x1 e4m3,e4m3",
    "grouped_gemm rows 130:0 130x1x17 e4m3,e4m3 tensorwise",
    "repeated_gemm 64x64x64",
    "linear tensorwise 8x16x16 F32",
];

/// A part of `bench`.
struct Part {
    name: &'static str,
    /// Start of its table's title.
    title: &'static str,
    /// Field of the results that distinguishes kinds of rows.
    of: &'static str,
    /// Expected values of that field.
    kinds: &'static [&'static str],
}

const PRECISIONS: &[&str] = &["tensorwise", "rowwise", "delayed", "blockwise", "mxfp8"];

/// All parts except `sweep`.
const PARTS: [Part; 9] = [
    Part {
        name: "gemm",
        title: "GEMM in TFLOP/s",
        of: "scales",
        // Includes the part `scaled`.
        kinds: &["tensorwise", "rowwise", "1x128,128x128", "1x128,128x128, powers of two", "1x32"],
    },
    Part { name: "gemv", title: "GEMMs of a few rows", of: "scales", kinds: &["tensorwise"] },
    Part {
        name: "host",
        title: "host time",
        of: "what",
        kinds: &[
            "scaled GEMM",
            "Burn's matmul",
            "linear, forward and backward, tensorwise",
            "the same, with 2,000 small tensors alive",
            "linear, forward and backward, Burn's",
        ],
    },
    Part {
        name: "linear",
        title: "forward + backward of one linear",
        of: "precision",
        kinds: &["tensorwise, fast accumulation", "blockwise", "blockwise, powers of two", "mxfp8"],
    },
    Part {
        name: "quantize",
        title: "casts of bf16",
        of: "what",
        kinds: &["amax", "cast", "tensorwise", "rowwise", "1x128", "128x128", "1x32"],
    },
    Part {
        name: "beside",
        title: "forward + backward beside the linears",
        of: "what",
        kinds: &["swiglu", "rms_norm", "rotary", "attention"],
    },
    Part { name: "step", title: "Llama train step", of: "precision", kinds: PRECISIONS },
    Part { name: "grouped", title: "grouped GEMM", of: "grouping", kinds: &["rows", "contraction"] },
    Part { name: "layer", title: "forward + backward of one Llama layer", of: "precision", kinds: PRECISIONS },
];

fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_float8-gpu"));
    command.args(arguments).env_remove("FLOAT8_SELF_CHECK");
    command
}

/// Standard output, after checking the exit code.
fn printed(output: &Output, code: i32) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(code), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// Whether a device is available. Without one the test prints that it is skipped, and fails in CI.
fn has_wgpu(test: &str) -> bool {
    let adapters = device_select::wgpu_adapters().expect("wgpu is compiled in");
    if adapters.is_empty() {
        assert!(std::env::var_os("CI").is_none(), "CI needs a Vulkan adapter: install mesa-vulkan-drivers");
        // Not `println!`, which the harness captures while a test passes.
        writeln!(std::io::stdout(), "{test}: skipped, no wgpu adapter").expect("standard output is open");
    }
    !adapters.is_empty()
}

/// Text of a field.
fn field<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_else(|| panic!("no {name} in {value}"))
}

#[test]
fn versions_names_the_device() {
    if has_wgpu("versions_names_the_device") {
        let output = program(&["--device", "wgpu", "versions"]).output().expect("the program starts");
        assert!(printed(&output, 0).starts_with("device: wgpu ("));
    }
}

#[test]
fn a_missing_device_ends_with_2() {
    // The driver then reports no device.
    let output = program(&["versions"]).env("CUDA_VISIBLE_DEVICES", "").output().expect("the program starts");
    assert_eq!(printed(&output, 2), "");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.starts_with("error: CUDA is not usable: "), "{error}");
}

#[test]
fn checks_of_every_kind_pass() {
    if !has_wgpu("checks_of_every_kind_pass") {
        return;
    }
    let folder = TempDir::new().expect("a folder for temporary files");
    let results = folder.path().join("check.jsonl");
    let only = CHECKS.iter().flat_map(|name| ["--only", name]);
    let mut command = program(&["--device", "wgpu", "check", "--quick"]);
    command.args(LIMITS).args(only).arg("--json").arg(&results);
    let text = printed(&command.output().expect("the program starts"), 0);
    let mut kinds = BTreeMap::<_, usize>::new();
    for line in fs::read_to_string(&results).expect("written").lines() {
        let result: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        assert!(result["worst"].is_number(), "{line}");
        *kinds.entry(field(&result, "name").split(' ').next().unwrap_or_default().to_string()).or_default() += 1;
    }
    for name in CHECKS {
        let kind = name.split(' ').next().unwrap_or_default();
        assert!(kinds.contains_key(kind), "no {kind} in {kinds:?}");
    }
    let last = format!("0 of {} wrong", kinds.values().sum::<usize>());
    assert_eq!(text.lines().last(), Some(last.as_str()), "{text}");

    let mut command = program(&["--device", "wgpu", "check", "--quick", "--only", "no such check"]);
    assert!(printed(&command.output().expect("the program starts"), 1).contains("no case has this name"));
}

#[test]
fn every_part_is_measured() {
    if !has_wgpu("every_part_is_measured") {
        return;
    }
    let folder = TempDir::new().expect("a folder for temporary files");
    let results = folder.path().join("full.json");
    fs::write(folder.path().join("torch.py"), TORCH).expect("writable");
    let mut command = program(&["--device", "wgpu", "bench", "--size", "tiny", "--repeat", "1"]);
    command.args(LIMITS).args(["--torch", "python3"]).env("PYTHONPATH", folder.path()).arg("--json").arg(&results);
    let text = printed(&command.output().expect("the program starts"), 0);
    let results: Value = serde_json::from_slice(&fs::read(&results).expect("written")).expect("JSON");

    assert_eq!(results["skipped"], Value::Array(vec![]), "{text}");
    for Part { name, title, of, kinds } in PARTS {
        let rows = results[name].as_array().unwrap_or_else(|| panic!("no rows of {name}\n{text}"));
        for kind in kinds {
            assert!(rows.iter().any(|row| field(row, of) == *kind), "no {kind} among {name}\n{text}");
        }
        // High precision, the reference of the speedups, in any dtype.
        assert!(of != "precision" || rows.iter().any(|row| row["speedup"] == 1.0), "{name}: {rows:#?}");
        for number in rows.iter().filter_map(Value::as_object).flat_map(|row| row.values()).filter_map(Value::as_f64) {
            assert!(number.is_finite() && number > 0.0, "{name}: {rows:#?}");
        }
        // Title and header, then one line per row.
        let table = text.lines().skip_while(|line| !line.starts_with(title)).take_while(|line| !line.is_empty());
        assert!(table.count() >= 2 + rows.len(), "{title}\n{text}");
    }
    // Only GEMMs with TMA have plans to choose from.
    let absent = "sweep: the path ";
    assert!(results["absent"][0].as_str().is_some_and(|why| why.starts_with(absent)), "{text}");
    assert!(text.contains(&format!("\nnot on this device: {absent}")), "{text}");
    for torch in ["gemm", "grouped", "linear"] {
        assert!(results["torch"][torch].as_array().is_some_and(|rows| !rows.is_empty()), "no {torch} of torch\n{text}");
    }
    assert!(results["summary"]["linear_to_bf16"].is_number(), "{text}");
    assert!(results["step"].as_array().is_some_and(|rows| rows.iter().all(|row| row["attention_share"].is_number())));
    // Tables with Burn's kernels state that they are untuned.
    let untuned = text.lines().filter(|line| line.ends_with("; Burn's kernels are untuned"));
    assert_eq!(untuned.count(), 6, "{text}");
    assert!(text.contains("\ntorch 2.x on none\n"), "{text}");
}
