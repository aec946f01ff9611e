//! CubeCL's CUDA server on the driver: what it learns of a device, copies, streams, every kernel
//! of this project, and linears.

mod common;

use std::collections::BTreeMap;

use burn::backend::Cuda;
use checks::{Case, Size, visit, visit_linears};
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::prelude::*;
use float8_kernels::{CudaArch, cuda_arch};

/// Devices of this process.
const DEVICES: &str = "90,100,89,80";

fn client(index: usize) -> Option<ComputeClient<CudaRuntime>> {
    common::driver(DEVICES).map(|_| CudaRuntime::client(&CudaDevice::new(index)))
}

/// Runs the cases of these names; each name must be of a case.
fn run(names: &[&str], walk: impl FnOnce(&mut dyn FnMut(Case<'_>))) {
    let mut left: Vec<_> = names.to_vec();
    let mut known: BTreeMap<String, String> = BTreeMap::new();
    walk(&mut |case| {
        let name = case.name.clone();
        known.entry(name.split(' ').next().unwrap_or_default().into()).or_insert_with(|| name.clone());
        if let Some(at) = left.iter().position(|wanted| *wanted == name) {
            left.swap_remove(at);
            let start = std::time::Instant::now();
            match case.run() {
                Ok(worst) => assert!((0.0..=1.0).contains(&worst), "{name}: {worst}"),
                Err(failure) => panic!("{name}: {failure}"),
            }
            eprintln!("{name}: {:?}", start.elapsed());
        }
    });
    assert!(left.is_empty(), "no case {left:?}; there are {known:#?}");
}

#[test]
fn properties() {
    let Some(client) = client(0) else { return };
    let hardware = &client.properties().hardware;
    assert_eq!(hardware.num_streaming_multiprocessors, Some(132));
    assert_eq!(hardware.max_shared_memory_size, 227 << 10);
    assert_eq!(hardware.max_cube_count, (i32::MAX as u32, 65535, 65535));
    assert_eq!(cuda_arch(&client), Some(CudaArch::Sm90));
}

#[test]
fn names() {
    let Some(client) = client(0) else { return };
    visit(&client, Size::Small, &mut |case| println!("{}", case.name));
    visit_linears::<Cuda>(Size::Small, &mut |case| println!("{}", case.name));
}
