//! CubeCL's CUDA server on the driver: what it learns of a device, copies, streams, every kernel
//! of this project, linears, and errors.

mod common;

use burn::backend::Cuda;
use checks::{Case, Failure, Gemm, PRECISE, Size, caught, visit, visit_linears};
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::prelude::*;
use cubecl::server::CopyDescriptor;
use fake_cuda::{Driver, Fault};
use float8_kernels::{CudaArch, GemmPath, Granularity, cuda_arch, gemm_path};

/// Devices of this process: three architectures, and one device for each fault.
const DEVICES: &str = "90,100,120,90,90,90,90";

fn client(index: usize) -> Option<(ComputeClient<CudaRuntime>, &'static Driver)> {
    common::driver(DEVICES).map(|driver| (CudaRuntime::client(&CudaDevice::new(index)), driver))
}

#[test]
fn properties() {
    for (index, arch, sms, shared) in
        [(0, CudaArch::Sm90, 132, 227), (1, CudaArch::Sm100, 148, 227), (2, CudaArch::Sm120, 170, 99)]
    {
        let Some((client, _)) = client(index) else { return };
        let hardware = &client.properties().hardware;
        assert_eq!(hardware.num_streaming_multiprocessors, Some(sms));
        assert_eq!(hardware.max_shared_memory_size, shared << 10);
        assert_eq!(hardware.max_cube_count, (i32::MAX as u32, 65535, 65535));
        assert_eq!((hardware.max_units_per_cube, hardware.max_cube_dim), (1024, (1024, 1024, 64)));
        assert_eq!((hardware.plane_size_min, hardware.plane_size_max), (32, 32));
        assert_eq!(cuda_arch(&client), Some(arch));
    }
}

/// Copies of rows of every length, flat and pitched, to and from the device.
#[test]
fn copies() {
    let Some((client, _)) = client(0) else { return };
    for shape in [vec![1], vec![1000], vec![3, 5], vec![7, 512], vec![2, 3, 129], vec![1, 1, 1, 70_000]] {
        let len = shape.iter().product::<usize>();
        let data: Vec<u8> = (0..len * 2).map(|i| (i % 251) as u8).collect();
        let layout = client.create_tensor_from_slice(&data, shape.clone().into(), 2);
        let descriptor = CopyDescriptor::new(layout.memory.clone().binding(), shape.clone().into(), layout.strides, 2);
        assert_eq!(client.read_one_unchecked_tensor(descriptor).to_vec(), data, "{shape:?}");
        assert_eq!(client.read_one_unchecked(client.create_from_slice(&data)).to_vec(), data, "{shape:?}");
    }
}

/// Memory that one stream writes, and another one reads after it, in a chain of ten streams.
#[test]
fn streams() {
    let Some((client, _)) = client(0) else { return };
    let mut handle = client.create_from_slice(&[0; 4096]);
    for stream in 1..=10u8 {
        let (sender, client) = (client.clone(), client.clone());
        handle = std::thread::spawn(move || {
            let old = sender.read_one_unchecked(handle).to_vec();
            assert_eq!(old, [stream - 1; 4096]);
            sender.create_from_slice(&[stream; 4096])
        })
        .join()
        .expect("the memory is the last stream's");
        drop(client);
    }
}

/// Runs the cases of these names; each name must be of a case.
fn run(names: &[&str], walk: impl FnOnce(&mut dyn FnMut(Case<'_>))) {
    let mut left: Vec<_> = names.to_vec();
    walk(&mut |case| {
        let name = case.name.clone();
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
    assert!(left.is_empty(), "no cases {left:?}");
}

/// A GEMM on a device with a fault.
fn gemm_with(index: usize, fault: Fault) -> Option<Result<f64, Failure>> {
    let (client, driver) = client(index)?;
    let gemm = Gemm { config: PRECISE, ..Gemm::new([64, 64, 128]) };
    assert_eq!(gemm_path(&client, [Granularity::Tensor; 2], PRECISE), GemmPath::Wgmma);
    driver.inject(index, &fault);
    let [a, b] = gemm.matrices();
    Some(caught(|| gemm.compare(&client, [&a, &b], 1.0)))
}

/// A launch that does nothing leaves poison, which the comparison sees.
#[test]
fn a_lost_launch_is_an_error() {
    let Some(done) = gemm_with(3, Fault::Lose("gemm".into())) else { return };
    assert!(matches!(done, Err(Failure::Wrong(_))), "{done:?}");
}

#[test]
fn a_refused_kernel_is_an_error() {
    let Some(done) = gemm_with(4, Fault::Refuse("gemm".into())) else { return };
    let error = done.unwrap_err().to_string();
    assert!(error.contains("Unable to load the PTX") && error.contains("CUDA_ERROR_INVALID_PTX"), "{error}");
}

#[test]
fn no_memory_is_an_error() {
    let Some(done) = gemm_with(5, Fault::Memory(4096)) else { return };
    let error = done.unwrap_err().to_string();
    assert!(error.contains("x"), "{error}");
}

/// The kernel traps after ten seconds of its clock.
#[test]
fn a_barrier_without_its_arrivals_is_an_error() {
    let Some(done) = gemm_with(6, Fault::Stick("gemm".into())) else { return };
    let error = done.unwrap_err().to_string();
    assert!(error.contains("CUDA_ERROR_LAUNCH_FAILED"), "{error}");
}

#[test]
fn names() {
    let Some((client, _)) = client(0) else { return };
    visit(&client, Size::Small, &mut |case| println!("{}", case.name));
    visit_linears::<Cuda>(Size::Small, &mut |case| println!("{}", case.name));
}

#[test]
fn one() {
    let Some((client, _)) = client(0) else { return };
    let Ok(name) = std::env::var("WE_CASE") else { return };
    run(&[&name], |visitor| {
        visit(&client, Size::Small, visitor);
        visit_linears::<Cuda>(Size::Small, visitor);
    });
}
