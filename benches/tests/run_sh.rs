//! End-to-end test of `benches/run.sh`, with mocks of `float8-gpu` and of NVIDIA's programs that
//! record their calls.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use codegen::device::{GenerateCuda, OfflineDevice};
use cubecl::prelude::Runtime;
use kernel_tests::{Size, visit};
use serde_json::Value;
use tempfile::TempDir;

/// Mock of `float8-gpu`. It records the location of the headers, CubeCL's cache, and the arguments
/// of each call. Like the real program, it writes results and runs torch.
const PROGRAM: &str = r#"#!/bin/bash
cache=$(sed -n 's/^cache = { file = "\(.*\)" }$/\1/p' cubecl.toml 2>/dev/null)
printf '%s\n' "$(readlink -f "${CUDA_PATH:-none}/include/mma.h")|$LD_LIBRARY_PATH|$cache|$*" >>"$CALLS"
for word; do
    case $last in
        --json) echo '{}' >>"$word" ;;
        --torch) "$word" -c 'import os; print(*(os.environ.get(name) for name in ("CUDA_PATH", "LD_LIBRARY_PATH")))' >>"$CALLS.torch" ;;
    esac
    last=$word
done
sleep "${TAKES:-0}"
case " $* " in *" $FAILS "*) exit "${CODE:-1}" ;; esac
"#;

/// Mock of the torch module: every call succeeds, and any two events are two milliseconds apart.
const TORCH: &str = r#"
import sys
from unittest.mock import MagicMock

torch = MagicMock(__version__="2.x")
torch.cuda.is_available.return_value = True
torch.cuda.get_device_name.return_value = "none"
torch.cuda.Event.return_value.elapsed_time.return_value = 2.0
sys.modules |= {__name__: torch, "torch.nn": torch.nn, "torch.nn.attention": torch.nn.attention}
"#;

struct Bundle {
    folder: TempDir,
}

impl Bundle {
    /// A bundle on a machine with a driver of CUDA 13.0.
    ///
    /// The machine has the toolkits 12.8 and 13.5, the wheels of 13.0, and headers of 13.0. Returns
    /// None without Python, after printing that the test is skipped.
    fn new() -> Option<Self> {
        Self::with(PROGRAM)
    }

    /// The same with this script for `float8-gpu`.
    fn with(program: &str) -> Option<Self> {
        if Command::new("python3").args(["-c", "import lzma"]).status().is_ok_and(|status| status.success()) {
            let bundle = Self { folder: TempDir::new().expect("a folder for temporary files") };
            bundle.fill(program);
            return Some(bundle);
        }
        test_data::skip("python3 with lzma");
        None
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("in the folder")).expect("writable");
        fs::write(&path, text).expect("writable");
        fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("ours");
    }

    fn fill(&self, program: &str) {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("run.sh");
        fs::create_dir(self.path("bundle")).expect("writable");
        fs::copy(source, self.path("bundle/run.sh")).expect("run.sh is there");
        self.write("float8-gpu", program);
        let pack = "import lzma, sys; lzma.open(sys.argv[2], 'wb').write(open(sys.argv[1], 'rb').read())";
        let packed = Command::new("python3")
            .args(["-c", pack])
            .args([self.path("float8-gpu"), self.path("bundle/float8-gpu.xz")])
            .status();
        assert!(packed.expect("python3 runs").success());
        self.write(
            "bin/nvidia-smi",
            "#!/bin/bash\ncase \"$*\" in\n*compute_cap*) echo ${ARCH:-9.0} ;;\n*query*) echo 'timestamp, clocks'; exec sleep 600 ;;\n\
             *) echo '| CUDA Version: 13.0 |' ;;\nesac\n",
        );
        for tool in ["ncu", "compute-sanitizer"] {
            self.write(&format!("bin/{tool}"), "#!/bin/bash\necho no permission; exit 9\n");
        }
        for (root, version) in [("old", "12.8.93"), ("new", "13.5.1"), ("python/nvidia/cu13", "13.0.88")] {
            self.write(&format!("{root}/lib/libnvrtc.so.{version}"), "");
            for header in ["mma.h", "cuda_fp16.h", "cooperative_groups.h", "cccl/cuda/barrier", "cccl/nv/target"] {
                self.write(&format!("{root}/include/{header}"), "");
            }
        }
        self.write("headers/include/cuda_runtime_api.h", "#define CUDART_VERSION  13000\n");
        self.write("headers/include/mma.h", "");
        self.write("python/nvidia/__init__.py", "");
    }

    /// Command of the script. The mock program fails on calls that contain `$FAILS`.
    fn script(&self, arguments: &[&str]) -> Command {
        let calls = self.path("calls");
        fs::write(&calls, "").expect("writable");
        let path = format!("{}:{}", self.path("bin").display(), std::env::var("PATH").expect("a path"));
        let mut command = Command::new("bash");
        command
            .arg(self.path("bundle/run.sh"))
            .args(arguments)
            .env("PATH", path)
            .env("PYTHONPATH", self.path("python"))
            .env("CALLS", &calls)
            .env("FAILS", "nothing")
            .env("FLOAT8_PTX_CACHE", self.path("cache"));
        for name in ["CUDA_PATH", "LD_LIBRARY_PATH", "OUT", "PYTHON"] {
            command.env_remove(name);
        }
        command
    }

    /// Exit code of the script with these variables, and the calls of the program.
    fn run(&self, arguments: &[&str], variables: &[(&str, &str)]) -> (i32, Vec<String>) {
        let output = self.script(arguments).envs(variables.iter().copied()).output().expect("bash runs");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        (output.status.code().expect("it exits"), self.calls())
    }

    fn calls(&self) -> Vec<String> {
        fs::read_to_string(self.path("calls")).expect("written").lines().map(String::from).collect()
    }

    /// Results of the last run.
    fn results(&self) -> Option<PathBuf> {
        let tars = ["first", "second"].map(|part| self.path(&format!("bundle/results-{part}.tar")));
        tars.into_iter()
            .max_by_key(|tar| fs::metadata(tar).and_then(|file| file.modified()).ok())
            .filter(|tar| tar.exists())
    }

    /// File in the results.
    fn result(&self, name: &str) -> String {
        let output = Command::new("tar")
            .arg("-xOf")
            .arg(self.results().expect("written"))
            .arg(format!("./{name}"))
            .output()
            .expect("tar runs");
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Arguments of each call of the program, from the log, which quotes them as they contain
    /// spaces.
    fn arguments(&self) -> Vec<Vec<String>> {
        let log = self.result("log.txt");
        let steps = log.lines().filter(|line| line.starts_with("== "));
        // A wrapper may precede the program's name: `env`, `ncu`.
        let calls = steps.filter_map(|line| line.split_once("/float8-gpu' '")).map(|(_, arguments)| arguments);
        calls.map(|call| call.trim_end_matches('\'').split("' '").map(String::from).collect()).collect()
    }

    fn summary(&self) -> Vec<String> {
        first_words(&self.result("summary.txt"))
    }
}

/// First two words of each line.
fn first_words(text: &str) -> Vec<String> {
    text.lines().map(|line| line.split_whitespace().take(2).collect::<Vec<_>>().join(" ")).collect()
}

/// Steps of the first command with their own time limits, and steps that share the rest.
const FIRST: [&str; 12] = [
    "versions",
    "smallest",
    "first",
    "pair",
    "casts",
    "cubes",
    "exact",
    "attention",
    "attention",
    "step",
    "host",
    "repeated",
];
const LEFT: [&str; 10] = ["golden", "clusters", "linears", "few", "beside", "gemv", "linear", "sweep", "rest", "full"];

#[test]
fn all_steps_run_in_their_order() {
    let Some(bundle) = Bundle::new() else { return };
    assert_eq!(bundle.run(&[], &[]).0, 0);
    let mut want: Vec<_> = FIRST.iter().chain(&LEFT).map(|step| format!("{step} passed")).collect();
    want.insert(3, "torch not".into());
    assert_eq!(bundle.summary(), want);
    assert_eq!(bundle.result("check.jsonl").lines().count(), 10);
    for part in ["first", "pair", "casts", "cubes", "attention", "step", "host"] {
        bundle.result(&format!("{part}.json"));
    }
    bundle.result("clocks.csv");
    assert_eq!(bundle.run(&["second"], &[]).0, 0);
    assert!(bundle.path("bundle/results-first.tar").exists());
    // Containers forbid the tools.
    let want = ["versions passed", "scaled passed", "torch not", "grouped passed", "synccheck FAILED", "ncu FAILED"];
    assert_eq!(bundle.summary(), want);
    assert!(bundle.result("log.txt").contains("'ncu' '--clock-control' 'none'"));
}

/// The plan prints the sum of its steps. With all overhead it fits in the command's time.
#[test]
fn the_plan_fits_its_command() {
    let Some(bundle) = Bundle::new() else { return };
    for (part, all) in [("first", 540), ("second", 200)] {
        let output = bundle.script(&[part, "--plan"]).output().expect("bash runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let lines = text.lines().map(|line| line.split_once(' ').expect("a name and seconds"));
        let (names, seconds): (Vec<_>, Vec<u32>) =
            lines.map(|(name, seconds)| (name, seconds.trim().parse::<u32>().expect("seconds"))).unzip();
        let at = names.iter().position(|name| *name == "sum").expect("a sum");
        assert_eq!(seconds[at], seconds[..at].iter().sum::<u32>(), "{text}");
        // Includes the steps' overhead and the final step.
        assert!(seconds[at..].iter().sum::<u32>() < all && bundle.calls().is_empty(), "{text}");
        assert!(part == "second" || names[..at] == FIRST, "{text}");
    }
}

/// The real program accepts every call: it fails because of the missing device, not because of an
/// argument. Every requested name matches a check on a Hopper GPU.
#[test]
fn the_program_takes_all_calls() {
    let Some(bundle) = Bundle::new() else { return };
    let mut checks = BTreeSet::new();
    visit(&GenerateCuda::client(&OfflineDevice::new(90)), Size::Full, &mut |case| {
        checks.insert(case.name);
    });
    let (mut count, mut asked) = (0, 0);
    for part in [&["first"][..], &["second"], &["first", "--tiny"]] {
        bundle.run(part, &[]);
        for call in bundle.arguments() {
            let mut program = Command::new(env!("CARGO_BIN_EXE_float8-gpu"));
            // The driver then reports no device.
            let output = program.args(&call).env("CUDA_VISIBLE_DEVICES", "").output().expect("the program starts");
            let error = String::from_utf8_lossy(&output.stderr);
            let is_device = output.status.code() == Some(2) && error.starts_with("error: CUDA is not usable: ");
            assert!(is_device && output.stdout.is_empty(), "{call:?}: {error}");
            count += 1;
            let only = call.windows(2).filter(|pair| call.contains(&"check".into()) && pair[0] == "--only");
            // Goldens and linears are not cases of a runtime.
            let names =
                only.map(|pair| &pair[1]).filter(|name| !name.starts_with("golden_") && !name.contains("256x512x384"));
            for name in names {
                assert!(checks.iter().any(|case| case.contains(name)), "no check has the name {name:?}");
                asked += 1;
            }
        }
    }
    assert!(count >= 30 && asked >= 12, "{count} calls, {asked} names");
}

/// All parts except `sweep`: the column that distinguishes kinds of rows, and the expected kinds.
const PARTS: [(&str, &str, &[&str]); 8] = [
    // Includes the part `scaled`.
    ("gemm", "scales", &["tensorwise", "rowwise", "1x128,128x128", "1x128,128x128, powers of two", "1x32"]),
    ("gemv", "scales", &["tensorwise"]),
    (
        "host",
        "what",
        &[
            "scaled GEMM",
            "Burn's matmul",
            "linear, forward and backward, tensorwise",
            "the same, with 2,000 small tensors alive",
            "linear, forward and backward, Burn's",
        ],
    ),
    ("linear", "precision", &["tensorwise, fast accumulation", "blockwise", "blockwise, powers of two", "mxfp8"]),
    ("quantize", "what", &["amax", "cast", "tensorwise", "rowwise", "1x128", "128x128", "1x32", "adamw"]),
    ("beside", "what", &["swiglu", "rms_norm", "rotary", "attention"]),
    ("step", "precision", &["tensorwise", "rowwise", "delayed", "blockwise", "mxfp8"]),
    ("grouped", "grouping", &["rows", "contraction"]),
];

/// Script and program together, in small shapes, with a stand-in for torch. It checks that results
/// are complete, not how long they took.
#[test]
fn it_runs_on_wgpu() {
    let program = format!("#!/bin/bash\nexec '{}' \"$@\"\n", env!("CARGO_BIN_EXE_float8-gpu"));
    let Some(bundle) = Bundle::with(&program) else { return };
    if device_select::wgpu_adapters().expect("wgpu is compiled in").is_empty() {
        return test_data::skip(test_data::VULKAN);
    }
    bundle.write("python/torch.py", TORCH);
    // Slow machines are not hangs.
    let run = |part| bundle.run(&[part, "--device", "wgpu", "--tiny", "--seconds", "6000"], &[]).0;
    let results =
        |file: &str| -> Value { serde_json::from_str(&bundle.result(&format!("{file}.json"))).expect("JSON") };
    assert_eq!(run("first"), 0, "{}", bundle.result("log.txt"));
    let want = ["versions", "smallest", "exact", "attention", "repeated", "full"].map(|step| format!("{step} passed"));
    assert_eq!(bundle.summary(), want);
    let (log, full) = (bundle.result("log.txt"), results("full"));
    let checks = bundle.result("check.jsonl");
    let is_right = |line: &str| serde_json::from_str::<Value>(line).is_ok_and(|result| result["worst"].is_number());
    assert!(checks.lines().count() > 10 && checks.lines().all(is_right), "{checks}");
    for (name, of, kinds) in PARTS {
        let rows = full[name].as_array().unwrap_or_else(|| panic!("no rows of {name}\n{log}"));
        for kind in kinds {
            assert!(rows.iter().any(|row| row[of] == *kind), "no {kind} among {name}: {rows:#?}");
        }
        // High precision, the reference of the speedups, in any dtype.
        assert!(of != "precision" || rows.iter().any(|row| row["speedup"] == 1.0), "{name}: {rows:#?}");
        let is_of_torch = ["gemm", "grouped", "linear", "beside"].contains(&name);
        assert!(!is_of_torch || rows.iter().any(|row| row["torch_bf16"].is_number()), "no {name} of torch: {rows:#?}");
        for number in rows.iter().filter_map(Value::as_object).flat_map(|row| row.values()).filter_map(Value::as_f64) {
            assert!(number.is_finite() && number > 0.0, "{name}: {rows:#?}");
        }
    }
    // Only GEMMs with TMA have plans to choose from.
    assert!(full["absent"][0].as_str().is_some_and(|why| why.starts_with("sweep: the path ")), "{full:#?}");
    assert!(full["skipped"] == Value::Array(vec![]) && full["summary"]["linear_to_bf16"].is_number(), "{full:#?}");
    for text in ["\nnot on this device: sweep: ", "; Burn's kernels are untuned\n", "\ntorch 2.x on none\n"] {
        assert!(log.contains(text), "no {text:?} in {log}");
    }
    assert_eq!(run("second"), 0, "{}", bundle.result("log.txt"));
    assert!(results("scaled")["gemm"].as_array().is_some_and(|rows| rows.len() == 4));
}

#[test]
fn a_failure_fails_the_run_and_the_next_step_runs() {
    let Some(bundle) = Bundle::new() else { return };
    assert_eq!(bundle.run(&[], &[("FAILS", "--only scaled_gemm 64x64x64 e4m3,e4m3")]).0, 1);
    let summary = bundle.summary();
    assert!(summary.windows(2).any(|lines| lines == ["smallest FAILED", "first passed"]), "{summary:?}");
    // Only the program's exit code for a missing device ends the run.
    let (code, calls) = bundle.run(&[], &[("FAILS", "versions")]);
    assert!(code == 1 && calls.len() > 2, "{calls:?}");
    let (code, calls) = bundle.run(&[], &[("FAILS", "versions"), ("CODE", "2")]);
    assert_eq!((code, calls.len()), (2, 1), "without a device there is nothing to do");
}

/// Without `CUDA_PATH` the newest version that the driver reads is taken: the wheels', not the
/// toolkit of 13.5. A toolkit without NVRTC and wheels with incomplete headers are merged.
#[test]
fn one_toolkit_is_taken() {
    let keep = "[ -e \"$CALLS.include\" ] || cp -rL \"$CUDA_PATH/include\" \"$CALLS.include\"";
    let Some(bundle) = Bundle::with(&PROGRAM.replace("sleep \"${TAKES:-0}\"", keep)) else { return };
    let headers = bundle.path("headers").display().to_string();
    let old = bundle.path("old").display().to_string();
    let wheels = "/python/nvidia/cu13";
    for (asked, include, lib) in
        [(&headers, "/headers", wheels), (&old, "/old", "/old"), (&String::new(), wheels, wheels)]
    {
        let (code, calls) = bundle.run(&["second"], &[("CUDA_PATH", asked)]);
        let [include, lib] = [format!("{include}/include/mma.h|"), format!("{lib}/lib|")];
        // A real toolkit on this machine may be equally new.
        let taken = |call: &String| call.contains(&include) && call.contains(&lib) || call.contains("/usr/local/cuda");
        assert!(code == 0 && calls.iter().all(taken), "{calls:#?}");
    }
    for header in ["cuda_runtime_api.h", "cuda_fp16.h", "cccl/nv/target"] {
        assert!(bundle.path("calls.include").join(header).exists(), "no {header}");
    }
}

/// Measurements share the compiled kernels of one architecture, which may travel along. Checks run
/// in parallel and share none.
#[test]
fn each_architecture_has_a_cache_of_its_own() {
    let Some(bundle) = Bundle::new() else { return };
    bundle.write("kernels/cuda/ptx", "");
    let pack = "import sys, tarfile; tarfile.open(sys.argv[2], 'w:xz').add(sys.argv[1], '.')";
    let archive = bundle.path("bundle/ptx-9.0_13.0.tar.xz");
    let packed = Command::new("python3").args(["-c", pack]).arg(bundle.path("kernels")).arg(archive).status();
    assert!(packed.expect("python3 runs").success());
    let [hopper, blackwell] = ["9.0", "10.0"].map(|arch| {
        let (_, calls) = bundle.run(&[], &[("ARCH", arch)]);
        let of = |command: &str| -> BTreeSet<PathBuf> {
            let calls = calls.iter().filter(|call| call.contains(&format!(" {command} ")));
            calls.map(|call| call.split('|').nth(2).expect("four fields").into()).collect()
        };
        assert_eq!(of("check"), BTreeSet::from([PathBuf::new()]), "{calls:#?}");
        let caches = of("bench");
        assert!(caches.len() == 1 && caches.iter().all(|cache| cache.is_dir()), "{caches:?}");
        caches.into_iter().next().expect("one")
    });
    assert!(hopper.join("cuda/ptx").is_file() && !blackwell.join("cuda/ptx").exists() && hopper != blackwell);
}

/// Torch does not load the toolkit's libraries.
#[test]
fn torch_has_the_environment_of_the_script() {
    let Some(bundle) = Bundle::new() else { return };
    bundle.write("python/torch.py", TORCH);
    let old = bundle.path("old").display().to_string();
    let set = [("CUDA_PATH", old.as_str()), ("LD_LIBRARY_PATH", &old)];
    for (variables, want) in [(&set[..0], "None None".into()), (&set[..], format!("{old} {old}"))] {
        assert_eq!(bundle.run(&["second"], variables).0, 0);
        let seen = fs::read_to_string(bundle.path("calls.torch")).expect("torch is called");
        fs::remove_file(bundle.path("calls.torch")).expect("just read");
        assert!(seen.lines().all(|line| line == want), "{seen}");
    }
}

#[test]
fn the_program_is_unpacked_by_what_is_there() {
    let Some(bundle) = Bundle::new() else { return };
    for tool in ["xz", "busybox", "7z"] {
        bundle.write(&format!("bin/{tool}"), "#!/bin/bash\nexit 1\n");
    }
    let (code, calls) = bundle.run(&["second"], &[]);
    assert!(code == 0 && !calls.is_empty());
    assert_eq!(bundle.run(&["second"], &[("PYTHON", "/none")]).0, 1);
    assert!(bundle.result("log.txt").starts_with("nothing unpacks float8-gpu.xz: xz, busybox, 7z and /none"));
}

/// A run killed at any time leaves the results of all reported steps except the last.
#[test]
fn a_killed_run_leaves_whole_results() {
    let Some(bundle) = Bundle::new() else { return };
    let mut steps = BTreeSet::new();
    for count in [1, 3, 6, 10, 15] {
        let _ = fs::remove_file(bundle.path("bundle/results-first.tar"));
        let log = fs::File::create(bundle.path("printed")).expect("writable");
        let mut script = bundle.script(&[]);
        script.env("TAKES", "0.05").stdout(log).stderr(Stdio::null()).process_group(0);
        let mut child = script.spawn().expect("bash runs");
        let passed =
            |text: &str| first_words(text).into_iter().filter(|line| line.ends_with(" passed")).collect::<Vec<_>>();
        let printed = || passed(&fs::read_to_string(bundle.path("printed")).expect("written"));
        while printed().len() < count && child.try_wait().expect("it is ours").is_none() {
            std::thread::sleep(Duration::from_millis(10));
        }
        // At another moment of each step.
        std::thread::sleep(Duration::from_millis(7 * count as u64));
        let killed = Command::new("kill").args(["-9", "--", &format!("-{}", child.id())]).status();
        let ended = child.wait().expect("it is ours");
        assert!(killed.is_ok_and(|status| status.success()) || ended.success());
        let (done, packed) = (printed(), passed(&bundle.result("summary.txt")));
        assert!(packed.len() + 1 >= done.len().min(20) && done.starts_with(&packed), "{packed:?}, not {done:?}");
        steps.insert(packed.len());
    }
    assert!(steps.len() > 2, "killed after {steps:?} steps");
}

/// The longest file keeps its beginning and its end, and the archive is smaller than 16 MiB.
#[test]
fn results_are_cut_to_fit() {
    let long = PROGRAM.replace("sleep \"${TAKES:-0}\"", "yes kernel | head -c 2999997");
    let Some(bundle) = Bundle::with(&long) else { return };
    assert_eq!(bundle.run(&[], &[]).0, 0);
    let log = bundle.result("log.txt");
    assert!(log.contains("driver of CUDA 13.0") && log.contains("\n[cut]\n") && log.ends_with("kernel\n"));
    let size = fs::metadata(bundle.path("bundle/results-first.tar")).expect("written").len();
    assert!(size < 16 << 20, "{size} bytes");
}
