//! End-to-end test of `benches/run.sh`, with mocks of `float8-gpu` and of NVIDIA's programs that
//! record their calls.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use checks::{Size, visit};
use codegen::device::{GenerateCuda, OfflineDevice};
use cubecl::prelude::Runtime;
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

/// Mock of the torch module.
const TORCH: &str = "__version__ = '2'\nclass cuda:\n    is_available = staticmethod(lambda: True)\n";

struct Bundle {
    folder: TempDir,
}

impl Bundle {
    /// A bundle on a machine with a driver of CUDA 13.0.
    ///
    /// The machine has the toolkits 12.8 and 13.5, the wheels of 13.0, and headers of 13.0. Returns
    /// None without Python, after printing that the test is skipped.
    fn new() -> Option<Self> {
        if Command::new("python3").args(["-c", "import lzma"]).status().is_ok_and(|status| status.success()) {
            let bundle = Self { folder: TempDir::new().expect("a folder for temporary files") };
            bundle.fill(PROGRAM);
            return Some(bundle);
        }
        assert!(std::env::var_os("CI").is_none(), "CI needs python3");
        writeln!(std::io::stdout(), "skipped: no python3 with lzma").expect("standard output is open");
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

    /// Command of the script. The mock program fails on calls that contain `fails`.
    fn script(&self, arguments: &[&str], fails: &str) -> Command {
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
            .env("FAILS", fails)
            .env("FLOAT8_PTX_CACHE", self.path("cache"));
        for name in ["CUDA_PATH", "LD_LIBRARY_PATH", "OUT", "PYTHON"] {
            command.env_remove(name);
        }
        command
    }

    /// Output of the script, and the calls of the program.
    fn run(&self, arguments: &[&str], fails: &str) -> (Output, Vec<String>) {
        let output = self.script(arguments, fails).output().expect("bash runs");
        (output, self.calls())
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
    let (output, calls) = bundle.run(&[], "nothing");
    let log = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{log}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    let mut want: Vec<_> = FIRST.iter().chain(&LEFT).map(|step| format!("{step} passed")).collect();
    want.insert(3, "torch not".into());
    assert_eq!(bundle.summary(), want, "{log}");
    // The newest version that the driver can read: the wheels', not the toolkit of 13.5. A real
    // toolkit on this machine may be equally new.
    let of_wheels = |call: &&String| call.contains("/python/nvidia/cu13/") || call.contains("/usr/local/cuda");
    assert_eq!(calls.iter().filter(of_wheels).count(), calls.len(), "{calls:#?}");
    assert_eq!(bundle.result("check.jsonl").lines().count(), 10);
    for part in ["first", "pair", "casts", "cubes", "attention", "step", "host"] {
        bundle.result(&format!("{part}.json"));
    }
    bundle.result("clocks.csv");

    let (output, _) = bundle.run(&["second"], "nothing");
    assert!(output.status.success() && bundle.path("bundle/results-first.tar").exists());
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
        let (output, calls) = bundle.run(&[part, "--plan"], "nothing");
        assert!(output.status.success() && calls.is_empty());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let lines: Vec<(&str, u32)> = text
            .lines()
            .map(|line| line.split_once(' ').expect("a name and seconds"))
            .map(|(name, seconds)| (name, seconds.trim().parse().expect("seconds")))
            .collect();
        let at = lines.iter().position(|(name, _)| *name == "sum").expect("a sum");
        assert_eq!(lines[at].1, lines[..at].iter().map(|(_, seconds)| seconds).sum::<u32>(), "{text}");
        // Includes the steps' overhead and the final step.
        assert!(lines[at..].iter().map(|(_, seconds)| seconds).sum::<u32>() < all, "{text}");
        if part == "first" {
            assert_eq!(lines[..at].iter().map(|(name, _)| *name).collect::<Vec<_>>(), FIRST);
        }
    }
}

/// Every requested name matches a check on a Hopper GPU.
#[test]
fn names_are_those_of_checks() {
    let Some(bundle) = Bundle::new() else { return };
    let mut names = BTreeSet::new();
    visit(&GenerateCuda::client(&OfflineDevice::new(90)), Size::Full, &mut |case| {
        names.insert(case.name);
    });
    let mut asked = 0;
    for part in ["first", "second"] {
        bundle.run(&[part], "nothing");
        for call in bundle.arguments().into_iter().filter(|call| call.iter().any(|word| word == "check")) {
            for name in call.windows(2).filter(|pair| pair[0] == "--only").map(|pair| &pair[1]) {
                // Goldens and linears are not cases of a runtime.
                if name.starts_with("golden_") || name.contains("256x512x384") {
                    continue;
                }
                assert!(names.iter().any(|case| case.contains(name)), "no check has the name {name:?}");
                asked += 1;
            }
        }
    }
    assert!(asked >= 12, "{asked} names");
}

/// The real program accepts every call: it fails because of the missing device, not because of an
/// argument.
#[test]
fn the_program_takes_all_calls() {
    let Some(bundle) = Bundle::new() else { return };
    let mut count = 0;
    for part in [&["first"][..], &["second"], &["first", "--tiny"]] {
        bundle.run(part, "nothing");
        for call in bundle.arguments() {
            let mut program = Command::new(env!("CARGO_BIN_EXE_float8-gpu"));
            // The driver then reports no device.
            let output = program.args(&call).env("CUDA_VISIBLE_DEVICES", "").output().expect("the program starts");
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(
                output.status.code() == Some(2) && error.starts_with("error: CUDA is not usable: "),
                "{call:?}: {error}"
            );
            count += 1;
        }
    }
    assert!(count >= 35, "{count} calls");
}

/// Script and program together, in small shapes: every file with results is written.
#[test]
fn it_runs_on_wgpu() {
    let Some(bundle) = Bundle::new() else { return };
    if device_select::wgpu_adapters().expect("wgpu is compiled in").is_empty() {
        assert!(std::env::var_os("CI").is_none(), "CI needs a Vulkan adapter: install mesa-vulkan-drivers");
        writeln!(std::io::stdout(), "skipped: no wgpu adapter").expect("standard output is open");
        return;
    }
    fs::remove_dir_all(bundle.path("bundle")).expect("made above");
    bundle.fill(&format!("#!/bin/bash\nexec '{}' \"$@\"\n", env!("CARGO_BIN_EXE_float8-gpu")));
    let run = |part| {
        // Slow machines are not hangs.
        let (output, _) = bundle.run(&[part, "--device", "wgpu", "--tiny", "--seconds", "6000"], "nothing");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        bundle.summary()
    };
    let rows = |file: &str, part: &str| {
        let results: Value = serde_json::from_str(&bundle.result(&format!("{file}.json"))).expect("JSON");
        results[part].as_array().unwrap_or_else(|| panic!("no {part} in {results}")).clone()
    };
    let mut want: Vec<_> = FIRST.iter().map(|step| format!("{step} passed")).collect();
    want.insert(3, "torch not".into());
    assert_eq!(run("first"), want);
    assert!(bundle.result("check.jsonl").lines().count() > 10);
    for (file, part, field) in [
        ("first", "gemm", "precise"),
        ("pair", "gemm", "precise"),
        ("pair", "linear", "milliseconds"),
        ("casts", "quantize", "share"),
        ("cubes", "gemm", "precise"),
        ("attention", "beside", "milliseconds"),
        ("step", "step", "milliseconds"),
        ("step", "step", "attention_share"),
        ("host", "host", "issue_microseconds"),
    ] {
        let rows = rows(file, part);
        assert!(!rows.is_empty() && rows.iter().all(|row| row[field].is_number()), "{file}: no {field} in {rows:?}");
    }
    assert!(rows("host", "host").iter().any(|row| row["what"] == "the same, with 2,000 small tensors alive"));
    for orientation in ["rows", "both"] {
        assert!(rows("casts", "quantize").iter().any(|row| row["orientation"] == orientation), "no {orientation}");
    }

    run("second");
    assert!(rows("scaled", "gemm").len() == 4 && !rows("grouped", "grouped").is_empty());
}

#[test]
fn a_failure_fails_the_run_and_the_next_step_runs() {
    let Some(bundle) = Bundle::new() else { return };
    let (output, _) = bundle.run(&[], "--only scaled_gemm 64x64x64 e4m3,e4m3");
    assert_eq!(output.status.code(), Some(1));
    let summary = bundle.summary();
    assert!(summary.windows(2).any(|lines| lines == ["smallest FAILED", "first passed"]), "{summary:?}");
    // Only the program's exit code for a missing device ends the run.
    let (output, calls) = bundle.run(&[], "versions");
    assert!(output.status.code() == Some(1) && calls.len() > 2, "{calls:?}");
    let output = bundle.script(&[], "versions").env("CODE", "2").output().expect("bash runs");
    assert_eq!((output.status.code(), bundle.calls().len()), (Some(2), 1), "without a device there is nothing to do");
}

#[test]
fn the_toolkit_that_is_asked_for_is_taken() {
    let Some(bundle) = Bundle::new() else { return };
    let output = bundle.script(&["second"], "nothing").env("CUDA_PATH", bundle.path("old")).output();
    assert!(output.expect("bash runs").status.success());
    let calls = bundle.calls();
    assert!(calls.iter().all(|call| call.contains("/old/include/mma.h|") && call.contains("/old/lib|")), "{calls:#?}");
}

/// A toolkit without NVRTC and wheels with incomplete headers are merged.
#[test]
fn headers_of_one_version_are_put_together() {
    let Some(bundle) = Bundle::new() else { return };
    let keep = "cp -rL \"$CUDA_PATH/include\" \"$CALLS.include\"";
    fs::remove_dir_all(bundle.path("bundle")).expect("made above");
    bundle.fill(&PROGRAM.replace("sleep \"${TAKES:-0}\"", &format!("[ -e \"$CALLS.include\" ] || {keep}")));
    let output = bundle.script(&["second"], "nothing").env("CUDA_PATH", bundle.path("headers")).output();
    assert!(output.expect("bash runs").status.success());
    let calls = bundle.calls();
    // The toolkit's headers take precedence over the wheels'.
    let merged = |call: &String| call.contains("/headers/include/mma.h|") && call.contains("/python/nvidia/cu13/lib|");
    assert!(calls.iter().all(merged), "{calls:#?}");
    for header in ["cuda_runtime_api.h", "cuda_fp16.h", "cccl/nv/target"] {
        assert!(bundle.path("calls.include").join(header).exists(), "no {header}");
    }
}

/// Measurements share the compiled kernels of one architecture. Checks run in parallel and share
/// none.
#[test]
fn each_architecture_has_a_cache_of_its_own() {
    let Some(bundle) = Bundle::new() else { return };
    let caches = |arch: &str| {
        bundle.script(&[], "nothing").env("ARCH", arch).output().expect("bash runs");
        let calls = bundle.calls();
        let of = |command: &str| -> BTreeSet<String> {
            let calls = calls.iter().filter(|call| call.contains(&format!(" {command} ")));
            calls.map(|call| call.split('|').nth(2).expect("four fields").to_string()).collect()
        };
        assert_eq!(of("check"), BTreeSet::from([String::new()]), "{calls:#?}");
        of("bench")
    };
    // Kernels that travel along, of one of them.
    bundle.write("kernels/cuda/ptx", "");
    let pack = "import sys, tarfile; tarfile.open(sys.argv[2], 'w:xz').add(sys.argv[1], '.')";
    let archive = bundle.path("bundle/ptx-9.0_13.0.tar.xz");
    let packed = Command::new("python3").args(["-c", pack]).arg(bundle.path("kernels")).arg(archive).status();
    assert!(packed.expect("python3 runs").success());
    let (hopper, blackwell) = (caches("9.0"), caches("10.0"));
    let has_kernels = |cache: &String| Path::new(cache).join("cuda/ptx").is_file();
    assert!(hopper.iter().all(has_kernels) && !blackwell.iter().any(has_kernels));
    assert_eq!((hopper.len(), blackwell.len()), (1, 1), "{hopper:?} {blackwell:?}");
    assert!(hopper.is_disjoint(&blackwell) && hopper.iter().all(|cache| Path::new(cache).is_dir()), "{hopper:?}");
}

/// Torch does not load the toolkit's libraries.
#[test]
fn torch_has_the_environment_of_the_script() {
    let Some(bundle) = Bundle::new() else { return };
    bundle.write("python/torch.py", TORCH);
    let run = |path: Option<&str>| {
        let mut script = bundle.script(&["second"], "nothing");
        if let Some(path) = path {
            script.env("CUDA_PATH", path).env("LD_LIBRARY_PATH", path);
        }
        assert!(script.output().expect("bash runs").status.success());
        let seen = fs::read_to_string(bundle.path("calls.torch")).expect("torch is called");
        fs::remove_file(bundle.path("calls.torch")).expect("just read");
        seen.lines().map(String::from).collect::<BTreeSet<_>>()
    };
    assert_eq!(run(None), BTreeSet::from(["None None".into()]));
    let old = bundle.path("old").display().to_string();
    assert_eq!(run(Some(&old)), BTreeSet::from([format!("{old} {old}")]));
}

#[test]
fn the_program_is_unpacked_by_what_is_there() {
    let Some(bundle) = Bundle::new() else { return };
    for tool in ["xz", "busybox", "7z"] {
        bundle.write(&format!("bin/{tool}"), "#!/bin/bash\nexit 1\n");
    }
    let (output, calls) = bundle.run(&["second"], "nothing");
    assert!(output.status.success() && !calls.is_empty());
    let output = bundle.script(&["second"], "nothing").env("PYTHON", "/none").output().expect("bash runs");
    assert_eq!(output.status.code(), Some(1));
    assert!(bundle.result("log.txt").starts_with("nothing unpacks float8-gpu.xz: xz, busybox, 7z and /none"));
}

/// A run killed at any time leaves the results of all reported steps except the last.
#[test]
fn a_killed_run_leaves_whole_results() {
    let Some(bundle) = Bundle::new() else { return };
    let mut steps = BTreeSet::new();
    for count in [0, 1, 3, 6, 10, 15] {
        let _ = fs::remove_file(bundle.path("bundle/results-first.tar"));
        let log = fs::File::create(bundle.path("printed")).expect("writable");
        let mut script = bundle.script(&[], "nothing");
        script.env("TAKES", "0.05").stdout(log).stderr(Stdio::null()).process_group(0);
        let mut child = script.spawn().expect("bash runs");
        let passed = || {
            let printed = fs::read_to_string(bundle.path("printed")).expect("written");
            first_words(&printed).into_iter().filter(|line| line.ends_with(" passed")).collect::<Vec<_>>()
        };
        while passed().len() < count && child.try_wait().expect("it is ours").is_none() {
            std::thread::sleep(Duration::from_millis(10));
        }
        // At another moment of each step.
        std::thread::sleep(Duration::from_millis(7 * count as u64));
        let killed = Command::new("kill").args(["-9", "--", &format!("-{}", child.id())]).status();
        let ended = child.wait().expect("it is ours");
        assert!(killed.is_ok_and(|status| status.success()) || ended.success());
        if bundle.results().is_none() {
            assert_eq!(count, 0, "no results");
            continue;
        }
        let done = passed();
        let packed: Vec<_> = bundle.summary().into_iter().filter(|line| line.ends_with(" passed")).collect();
        assert!(packed.len() + 1 >= done.len().min(20) && done.starts_with(&packed), "{packed:?}, not {done:?}");
        steps.insert(packed.len());
    }
    assert!(steps.len() > 2, "killed after {steps:?} steps");
}

/// The longest file keeps its beginning and its end, and the archive is smaller than 16 MiB.
#[test]
fn results_are_cut_to_fit() {
    let Some(bundle) = Bundle::new() else { return };
    fs::remove_dir_all(bundle.path("bundle")).expect("made above");
    bundle.fill(&PROGRAM.replace("sleep \"${TAKES:-0}\"", "yes kernel | head -c 2999997"));
    let (output, _) = bundle.run(&[], "nothing");
    assert!(output.status.success());
    let log = bundle.result("log.txt");
    assert!(log.contains("driver of CUDA 13.0") && log.contains("\n[cut]\n") && log.ends_with("kernel\n"));
    let size = fs::metadata(bundle.path("bundle/results-first.tar")).expect("written").len();
    assert!(size < 16 << 20, "{size} bytes");
}
