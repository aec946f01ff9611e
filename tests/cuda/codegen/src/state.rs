//! Emulated devices with each architecture's properties, as CubeCL's CUDA runtime reports them;
//! recorded launches, and execution settings.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use burn_backend::DeviceOps;
use cubecl_common::device::{Device, DeviceId};
use cubecl_common::hash::StableHash;
use cubecl_common::profile::TimingMethod;
use cubecl_core::ir::features::{AtomicUsage, Plane, Tma, TypeUsage};
use cubecl_core::ir::{
    BarrierLevel, DeviceProperties, ElemType, FloatKind, HardwareProperties, MemoryDeviceProperties, OpaqueType,
    SemanticType, StorageType, Type, VectorSize,
};
use cubecl_cpp::cuda::arch::CudaArchitecture;
use cubecl_cpp::cuda::mma::CudaWmmaCompiler;
use cubecl_cpp::shared::{
    CompilationOptions, CppSupportedFeatures, register_mma_features, register_scaled_mma_features,
    register_wmma_features,
};
use cubecl_cpp::{DialectWmmaCompiler, register_supported_types};
use ptx_interpreter::Accumulator;

use crate::nvrtc::{Nvrtc, sorted};

/// Emulated device.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OfflineDevice {
    /// Ten times the compute capability, such as 90.
    pub sm: u16,
    /// Number of SMs. With few of them even small problems use large tiles, and several tiles per
    /// block.
    pub sms: u16,
}

impl OfflineDevice {
    /// Device with the SMs of an H200.
    pub const fn new(sm: u16) -> Self {
        Self { sm, sms: 132 }
    }
}

impl Default for OfflineDevice {
    fn default() -> Self {
        Self::new(90)
    }
}

impl Device for OfflineDevice {
    fn from_id(id: DeviceId) -> Self {
        Self { sm: id.index_id, sms: id.type_id }
    }

    fn to_id(&self) -> DeviceId {
        DeviceId { type_id: self.sms, index_id: self.sm }
    }
}

impl DeviceOps for OfflineDevice {}

/// Kernel as passed to NVRTC.
#[derive(Clone, Debug)]
pub struct Generated {
    /// Architecture of the device.
    pub sm: u32,
    /// Key of the kernel in CubeCL's cache of compiled kernels.
    pub cache_key: StableHash,
    /// Entry point.
    pub name: String,
    /// CUDA C++.
    pub source: String,
    /// Dynamic shared memory in bytes.
    pub dynamic_shared: usize,
    /// Threads of a block, by axis.
    pub block: [u32; 3],
    /// Whether the host copies shapes to the device before the launch.
    pub copies_shapes: bool,
}

impl Generated {
    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        self.block.iter().product()
    }

    /// Source with sorted declarations: CubeCL prints the types of a kernel in varying order.
    pub fn key(&self) -> String {
        sorted(&self.source)
    }
}

/// Launches since the last [`take`].
pub(crate) static GENERATED: Mutex<Vec<Result<Generated, String>>> = Mutex::new(Vec::new());

/// Kernels launched since the last call.
///
/// # Panics
/// If CubeCL could not generate one.
pub fn take() -> Vec<Generated> {
    let generated = core::mem::take(&mut *GENERATED.lock().unwrap());
    generated.into_iter().map(|kernel| kernel.unwrap_or_else(|error| panic!("{error}"))).collect()
}

/// Reads and syncs, at which a host would wait for its device.
pub(crate) static WAITS: AtomicUsize = AtomicUsize::new(0);

/// Device memory allocations.
pub(crate) static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

/// Device memory allocations since the last call.
pub fn take_allocations() -> usize {
    ALLOCATIONS.swap(0, Relaxed)
}

/// Reads and syncs since the last call, at which a host would wait.
pub fn take_waits() -> usize {
    WAITS.swap(0, Relaxed)
}

/// Whether launches are only counted.
pub(crate) static IDLE: AtomicBool = AtomicBool::new(false);

/// Counted launches.
pub(crate) static LAUNCHES: AtomicUsize = AtomicUsize::new(0);

/// Bytes of the counted launches' tensors.
pub(crate) static BYTES: AtomicU64 = AtomicU64::new(0);

/// Copies from host to device.
pub(crate) static UPLOADS: AtomicUsize = AtomicUsize::new(0);

/// Guard during which launches on [`GenerateCuda`](crate::device::GenerateCuda) are only counted:
/// no kernel is generated.
pub struct Idle(());

impl Idle {
    /// Launches since the last call.
    pub fn take_launches(&self) -> usize {
        LAUNCHES.swap(0, Relaxed)
    }

    /// Copies from the host since the last call.
    pub fn take_uploads(&self) -> usize {
        UPLOADS.swap(0, Relaxed)
    }

    /// Bytes of all tensors of launches since the last call: the traffic if each launch reads or
    /// writes all of them once.
    pub fn take_bytes(&self) -> u64 {
        BYTES.swap(0, Relaxed)
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        IDLE.store(false, Relaxed);
    }
}

/// Counts launches without generating kernels until the guard is dropped, for measurements of host
/// time.
pub fn idle() -> Idle {
    IDLE.store(true, Relaxed);
    Idle(())
}

/// Settings of executed launches.
#[derive(Clone, Copy, Debug, Default)]
pub struct Execution {
    /// See [`Launch::seed`](ptx_interpreter::Launch::seed).
    pub seed: u64,
}

/// Compiler and settings of executed launches.
pub(crate) struct Executor {
    pub(crate) nvrtc: Arc<Nvrtc>,
    pub(crate) seed: u64,
    pub(crate) accumulator: Accumulator,
    /// Number of launches of each kernel, by its source.
    pub(crate) launches: HashMap<String, usize>,
}

/// Set while launches are executed.
pub(crate) static EXECUTION: Mutex<Option<Executor>> = Mutex::new(None);

/// Allows one exclusive execution, or several shared ones: the seed is process-wide.
static TURN: RwLock<()> = RwLock::new(());

/// Number of users of the shared execution.
static SHARED: Mutex<usize> = Mutex::new(0);

/// Guard during which launches on [`GenerateCuda`](crate::device::GenerateCuda) are executed.
pub struct Running {
    _turn: RwLockWriteGuard<'static, ()>,
}

/// Guard during which launches are executed, shared with other holders.
pub struct RunningShared {
    _turn: RwLockReadGuard<'static, ()>,
}

impl Running {
    /// Sets the accumulation of FP8 products for later launches; the default is in full.
    pub fn set_accumulator(&self, accumulator: Accumulator) {
        let mut execution = EXECUTION.lock().unwrap_or_else(PoisonError::into_inner);
        execution.as_mut().expect("launches are executed").accumulator = accumulator;
    }

    /// Number of launches of kernels whose CUDA source contains this text.
    pub fn launches_of(&self, text: &str) -> usize {
        let execution = EXECUTION.lock().unwrap_or_else(PoisonError::into_inner);
        let launches = &execution.as_ref().expect("launches are executed").launches;
        launches.iter().filter(|(source, _)| source.contains(text)).map(|(_, count)| count).sum()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        end();
    }
}

impl Drop for RunningShared {
    fn drop(&mut self) {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        *shared -= 1;
        if *shared == 0 {
            end();
        }
    }
}

/// Compiles launches to PTX and interprets them ([`ptx_interpreter`]) until the guard is dropped.
///
/// Memory allocated meanwhile starts as poison. Waits for other executions of the process. The next
/// read or sync returns faults of kernels as errors.
///
/// Returns None, after printing that the test is skipped, if `FLOAT8_CUDA_TOOLS` is not set.
///
/// # Panics
/// If the variable's folder is not a toolkit, or it is not set in CI.
pub fn execute(execution: Execution) -> Option<Running> {
    let turn = TURN.write().unwrap_or_else(PoisonError::into_inner);
    begin(execution)?;
    Some(Running { _turn: turn })
}

/// Like [`execute`] with default settings, shared with other callers.
///
/// # Panics
/// As [`execute`].
pub fn execute_shared() -> Option<RunningShared> {
    let turn = TURN.read().unwrap_or_else(PoisonError::into_inner);
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    if *shared == 0 {
        begin(Execution::default())?;
    }
    *shared += 1;
    Some(RunningShared { _turn: turn })
}

/// Allows this thread, and threads that it starts, to sleep two milliseconds longer than asked. An idle
/// device thread of CubeCL polls every 150 µs, which for twenty devices takes half a core.
pub fn sleep_longer() {
    #[cfg(target_os = "linux")]
    // SAFETY: changes nothing but the slack of the thread's timers.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, 2_000_000);
    }
}

/// Turns execution on; None without a toolkit.
fn begin(execution: Execution) -> Option<()> {
    static NVRTC: OnceLock<Arc<Nvrtc>> = OnceLock::new();
    let nvrtc = match NVRTC.get() {
        Some(nvrtc) => nvrtc.clone(),
        None => {
            let nvrtc = Arc::new(Nvrtc::from_env()?);
            NVRTC.get_or_init(|| nvrtc).clone()
        }
    };
    *EXECUTION.lock().unwrap_or_else(PoisonError::into_inner) =
        Some(Executor { nvrtc, seed: execution.seed, accumulator: Accumulator::Full, launches: HashMap::new() });
    Some(())
}

/// Turns execution off.
fn end() {
    *EXECUTION.lock().unwrap_or_else(PoisonError::into_inner) = None;
}

/// Runs `check` for all of these in parallel, as each device has a separate thread.
pub fn on_each<T: Send, const N: usize>(devices: [T; N], check: impl Fn(T) + Sync) {
    let check = &check;
    std::thread::scope(|scope| devices.map(|device| drop(scope.spawn(move || check(device)))));
}

pub(crate) const MAX_GRID: (u32, u32, u32) = (i32::MAX as u32, 65535, 65535);

/// Compiler options for this architecture.
pub(crate) fn options(sm: u32) -> CompilationOptions {
    CompilationOptions {
        warp_size: 32,
        supports_features: CppSupportedFeatures {
            grid_constants: sm >= 70,
            clusters: sm >= 90,
            fast_math: true,
            fast_tanh: sm >= 75,
            elect_sync: sm >= 90,
        },
    }
}

/// Maximum bytes of shared memory per block, from the CUDA programming guide's table of compute
/// capabilities.
pub fn max_shared_memory(sm: u32) -> usize {
    match sm {
        80 | 87 => 163 * 1024,
        86 | 89 | 120.. => 99 * 1024,
        _ => 227 * 1024,
    }
}

/// Properties that CubeCL's CUDA runtime registers for a device.
pub(crate) fn properties(device: &OfflineDevice) -> DeviceProperties {
    let sm = u32::from(device.sm);
    let hardware = HardwareProperties {
        load_width: 128,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: max_shared_memory(sm),
        max_cube_count: MAX_GRID,
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(u32::from(device.sms)),
        num_tensor_cores: matches!(sm, 80 | 86 | 89 | 90..=92 | 100).then_some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        max_vector_size: VectorSize::MAX,
    };
    let memory = MemoryDeviceProperties { max_page_size: 20 << 30, alignment: 512 };
    let mut properties = DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::System);
    register_supported_types(&mut properties);
    let stored = TypeUsage::Conversion | TypeUsage::Buffer;
    let floats = |kinds: &[FloatKind]| kinds.iter().map(|kind| ElemType::Float(*kind)).collect::<Vec<_>>();
    properties.register_type_usage(ElemType::Float(FloatKind::TF32), TypeUsage::Conversion);
    let mut added = vec![(FloatKind::F64, 1), (FloatKind::F16, 1), (FloatKind::F16, 2)];
    properties.register_semantic_type(SemanticType::Pipeline);
    for level in [BarrierLevel::Unit, BarrierLevel::Cube] {
        properties.register_type_usage(OpaqueType::Barrier(level), TypeUsage::Buffer);
    }
    properties.features.plane = Plane::Sync | Plane::Ops | Plane::NonUniformControlFlow;
    let halves = floats(&[FloatKind::F16, FloatKind::BF16]);
    properties.features.matmul.ldmatrix.extend(halves.iter().map(|half| StorageType::from(*half)));
    properties.features.copy_async = true;
    properties.features.memory_reinterpret = true;
    properties.features.alignment = true;
    if sm >= 89 {
        for float in floats(&[FloatKind::E4M3, FloatKind::E5M2]) {
            properties.register_type_usage(float, stored);
        }
    }
    if sm >= 90 {
        properties.features.tma.insert(Tma::Base);
        properties.register_semantic_type(SemanticType::TensorMap);
        properties.features.cube_cluster = true;
        properties.features.matmul.stmatrix.extend(halves.iter().map(|half| StorageType::from(*half)));
        added.extend([(FloatKind::F32, 2), (FloatKind::F32, 4)]);
    }
    if sm >= 100 {
        properties.features.tma |= Tma::Im2colWide | Tma::SwizzleAtomicity;
        properties.register_type_usage(ElemType::Float(FloatKind::E2M1), TypeUsage::Conversion);
        properties.register_type_usage(StorageType::Packed(ElemType::Float(FloatKind::E2M1), 2), stored);
        for float in floats(&[FloatKind::E2M3, FloatKind::E3M2, FloatKind::UE8M0]) {
            properties.register_type_usage(float, stored);
        }
    }
    for (kind, width) in added {
        let atomic = Type::new(StorageType::Atomic(ElemType::Float(kind))).with_vector_size(width);
        properties.register_atomic_type_usage(atomic, AtomicUsage::Add | AtomicUsage::LoadStore);
    }
    let arch = CudaArchitecture { version: sm };
    register_wmma_features(CudaWmmaCompiler::supported_wmma_combinations(&arch), &mut properties);
    register_mma_features(CudaWmmaCompiler::supported_mma_combinations(&arch), &mut properties);
    register_scaled_mma_features(CudaWmmaCompiler::supported_scaled_mma_combinations(&arch), &mut properties);
    properties
}
