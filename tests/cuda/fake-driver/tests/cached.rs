//! A machine with a driver, and without NVRTC or headers, runs the kernels of CubeCL's cache.

use std::path::PathBuf;
use std::process::Command;

use burn_float8::backend::device_error;
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::prelude::*;
use device_select::cuda_setup;
use float8_kernels::{Granularity, scaled_gemm};
use kernel_tests::{F32, Gemm, PRECISE};

/// Set in the processes that this test starts.
const CHILD: &str = "FAKE_CUDA_CHILD";

#[test]
fn a_filled_cache_needs_no_compiler() {
    if std::env::var_os(CHILD).is_some() {
        let setup = cuda_setup().expect("a usable driver");
        let has_nvrtc = setup.nvrtc.is_some();
        println!("NVRTC: {:?}", setup.nvrtc.map(|nvrtc| nvrtc.to_string()));
        device_error();
        let client = CudaRuntime::client(&CudaDevice::new(0));
        let product = |gemm: Gemm| {
            let [a, b] = gemm.matrices().map(|matrix| matrix.upload(&client));
            let product = scaled_gemm(&client, &a, &b, None, F32, PRECISE).expect("operands that fit");
            client.read_one_unchecked(product)
        };
        let cached = Gemm::new([70, 133, 200]);
        println!("product: {:?}", product(cached).iter().map(|byte| u64::from(*byte)).sum::<u64>());
        assert_eq!(device_error(), None);
        if !has_nvrtc {
            // A launch of a kernel that the cache lacks is lost without an error of the read.
            product(Gemm { granularities: [Granularity::Row; 2], ..cached });
            let error = device_error().expect("the hook has seen it");
            assert!(error.contains("nvrtc"), "{error}");
        }
        return;
    }
    let Some(toolkit) = std::env::var_os("FLOAT8_CUDA_TOOLS").map(PathBuf::from) else {
        return test_data::skip(test_data::CUDA_TOOLS);
    };
    let folder = tempfile::tempdir().expect("a folder for temporary files");
    let config = format!("[compilation]\ncache = {{ file = \"{}\" }}\n", folder.path().display());
    std::fs::write(folder.path().join("cubecl.toml"), config).expect("writable");
    // Lines of a process whose toolkit is here, or nowhere.
    let run = |toolkit: Option<&PathBuf>, check_only: bool| {
        let mut command = Command::new(std::env::current_exe().expect("a test has a path"));
        command.args(["--exact", "a_filled_cache_needs_no_compiler", "--nocapture", "--test-threads", "1"]);
        command.current_dir(folder.path()).env(CHILD, "1").env("LD_PRELOAD", fake_cuda::library());
        command.env_remove("LD_LIBRARY_PATH").env("CUDA_PATH", toolkit.map_or("/none".into(), |path| path.clone()));
        if let Some(toolkit) = toolkit {
            command.env("LD_LIBRARY_PATH", toolkit.join("lib"));
        }
        if check_only {
            command.env("FAKE_CUDA_CHECK_ONLY", "1");
        }
        let output = command.output().expect("it starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        let line = |name: &str| text.lines().find_map(|line| line.split_once(name)).expect("printed").1.to_string();
        [line("NVRTC: "), line("product: ")]
    };
    // Launches are only checked, which fills the cache.
    let [nvrtc, _] = run(Some(&toolkit), true);
    assert_eq!(nvrtc, "Some(\"13.0\")");
    let [nvrtc, product] = run(None, false);
    // A machine may have a toolkit where every program finds it.
    assert!(nvrtc == "None" || std::path::Path::new("/usr/local/cuda").exists(), "{nvrtc}");
    assert_eq!(product, run(Some(&toolkit), false)[1]);
}
