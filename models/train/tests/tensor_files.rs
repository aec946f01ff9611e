//! Tensors in files: reading them back, and the state of a file or folder after an error.
#![allow(missing_docs)]

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use safetensors::{Dtype, SafeTensors};
use train::checkpoint::{CheckpointFolder, CheckpointKind, saved_steps};
use train::tensor_files::{NewTensor, bf16_bytes, f32_bytes, write_file, write_shards};
use train::{TensorFiles, TensorFilesError, create_folder};

/// Error type of a caller.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("the device is gone")]
    Device,
    #[error(transparent)]
    Files(#[from] TensorFilesError),
    #[error(transparent)]
    Folder(#[from] anyhow::Error),
}

fn tensor(name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> NewTensor<'static, Failure> {
    NewTensor { name: name.into(), dtype, shape: shape.into(), bytes: Box::new(move || Ok(bytes.clone())) }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_is_written_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state.safetensors");
    let tensors = [
        tensor("moment", Dtype::BF16, &[2, 1], bf16_bytes(&[1.0, -2.0])),
        tensor("codes", Dtype::U8, &[3], vec![1, 2, 255]),
        tensor("scalar", Dtype::F32, &[], f32_bytes(&[1.5])),
        tensor("nothing", Dtype::F32, &[0, 4], vec![]),
    ];
    write_file(&path, &tensors, Some(HashMap::from([("step".into(), "7".into())]))).unwrap();
    let (_, header) = SafeTensors::read_metadata(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["step"], "7");

    let files = TensorFiles::open_file(&path).unwrap();
    assert_eq!(files.names().collect::<Vec<_>>(), ["codes", "moment", "nothing", "scalar"]);
    for NewTensor { name, dtype, shape, bytes } in &tensors {
        let read = files.get(name).unwrap();
        assert_eq!((read.dtype(), read.shape()), (*dtype, &shape[..]));
        assert_eq!(&*read.bytes().unwrap(), bytes().unwrap(), "{name}");
    }
    assert_eq!(files.get("moment").unwrap().to_f32().unwrap(), [1.0, -2.0]);
    assert_eq!(files.get("scalar").unwrap().to_f32().unwrap(), [1.5]);
    assert_eq!(&*files.get("moment").unwrap().bytes().unwrap(), [0x80, 0x3f, 0x00, 0xc0]);
    assert!(files.expect("nothing", &[0, 4]).unwrap().to_f32().unwrap().is_empty());
    assert!(
        matches!(files.get("codes").unwrap().to_f32(), Err(TensorFilesError::Dtype { dtype, .. }) if dtype == "U8")
    );
    assert!(matches!(files.expect("codes", &[4]), Err(TensorFilesError::Shape { found, .. }) if found == [3]));
    assert!(matches!(files.expect("absent", &[4]), Err(TensorFilesError::Missing { shape, .. }) if shape == [4]));
    assert!(files.get("absent").is_none());
}

#[test]
fn a_file_that_is_cut_after_it_was_opened_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cut.safetensors");
    write_file(&path, &[tensor("x", Dtype::U8, &[10_000], vec![7; 10_000])], None).unwrap();
    let files = TensorFiles::open_file(&path).unwrap();
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(100).unwrap();
    match files.get("x").unwrap().bytes() {
        Err(TensorFilesError::Broken { reason, .. }) => assert!(reason.starts_with("100 bytes"), "{reason}"),
        other => panic!("{other:?}"),
    }
}

/// A tensor larger than a decoded chunk, from the first row and from others.
#[test]
fn rows_of_a_large_tensor_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("large.safetensors");
    let values: Vec<f32> = (0..700_000).map(|i| i as f32).collect();
    write_file(&path, &[tensor("x", Dtype::F32, &[7, 100_000], f32_bytes(&values))], None).unwrap();
    let files = TensorFiles::open_file(&path).unwrap();
    let read = files.get("x").unwrap();
    assert!(read.to_f32().unwrap() == values);
    assert!(read.rows_f32(2..6).unwrap() == values[200_000..600_000]);
    assert!(read.rows_f32(7..7).unwrap().is_empty());
}

/// An index may be untrusted too.
#[test]
fn shards_are_files_of_their_folder() {
    let dir = tempfile::tempdir().unwrap();
    let outside = dir.path().join("outside.safetensors");
    write_file(&outside, &[tensor("x", Dtype::U8, &[1], vec![7])], None).unwrap();
    let folder = dir.path().join("model");
    fs::create_dir(&folder).unwrap();
    for shard in ["../outside.safetensors", outside.to_str().unwrap(), "./../outside.safetensors", ""] {
        let index = serde_json::json!({ "weight_map": { "x": shard } });
        fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
        match TensorFiles::open_folder(&folder) {
            Err(TensorFilesError::Broken { reason, .. }) => {
                assert!(reason.contains("is not the name of a file"), "{reason}")
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_shard_that_is_gone_is_named_with_a_tensor_of_it() {
    let dir = tempfile::tempdir().unwrap();
    write_file(&dir.path().join("1.safetensors"), &[tensor("x", Dtype::U8, &[1], vec![7])], None).unwrap();
    let index = dir.path().join("model.safetensors.index.json");
    let map = serde_json::json!({ "weight_map": { "x": "1.safetensors", "y": "2.safetensors", "z": "2.safetensors" } });
    fs::write(&index, map.to_string()).unwrap();
    match TensorFiles::open_folder(dir.path()) {
        Err(TensorFilesError::MissingShard { path, name, index: said }) => {
            assert_eq!((path, &*name, said), (dir.path().join("2.safetensors"), "y", index));
        }
        other => panic!("{other:?}"),
    }
}

#[cfg(unix)]
#[test]
fn a_pipe_is_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    match TensorFiles::open_folder(dir.path()) {
        Err(TensorFilesError::Io { source, .. }) => assert!(source.to_string().contains("it is a pipe"), "{source}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_file_that_fails_replaces_none_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let good = || tensor("good", Dtype::F32, &[2], vec![0; 8]);
    let write = |tensors: &[NewTensor<'_, Failure>]| {
        fs::write(&path, "what was there before").unwrap();
        let error = write_file(&path, tensors, None).unwrap_err();
        assert_eq!(names(dir.path()), ["x.safetensors"], "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"what was there before");
        error
    };
    let gone = NewTensor { bytes: Box::new(|| Err(Failure::Device)), ..tensor("gone", Dtype::F32, &[2], vec![]) };
    // Written after the tensor that fails.
    let never = NewTensor { bytes: Box::new(|| panic!("asked for")), ..tensor("never", Dtype::F32, &[2], vec![]) };
    assert!(matches!(write(&[never, good(), gone]), Failure::Device));
    let short = write(&[good(), tensor("short", Dtype::F32, &[2], vec![0; 7])]).to_string();
    assert!(short.ends_with("short has 7 bytes, its shape says 8"), "{short}");
    let twice = write(&[good(), good()]).to_string();
    assert!(twice.ends_with("two tensors are called good"), "{twice}");
    let huge = write(&[tensor("huge", Dtype::F32, &[usize::MAX, 2], vec![])]).to_string();
    assert!(huge.contains("huge [18446744073709551615, 2]"), "{huge}");

    let folder = dir.path().join("shards");
    fs::create_dir(&folder).unwrap();
    let twice = write_shards(&folder, &[good(), good()], 8).unwrap_err().to_string();
    assert!(twice.ends_with("two tensors are called good"), "{twice}");
    let absent = write_shards(&dir.path().join("absent"), &[good()], 8).unwrap_err();
    assert!(matches!(absent, Failure::Files(TensorFilesError::Write { .. })), "{absent}");
}

#[cfg(unix)]
#[test]
fn a_link_is_not_written_through() {
    let dir = tempfile::tempdir().unwrap();
    let (path, outside) = (dir.path().join("x.safetensors"), dir.path().join("outside"));
    fs::write(&outside, "theirs").unwrap();
    std::os::unix::fs::symlink(&outside, &path).unwrap();
    match write_file(&path, &[tensor("x", Dtype::U8, &[1], vec![7])], None) {
        Err(Failure::Files(TensorFilesError::Write { source, .. })) => {
            assert!(source.to_string().contains("it is a link"), "{source}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!((names(dir.path()).len(), fs::read(&outside).unwrap()), (2, b"theirs".to_vec()));
}

fn is_occupied(result: Result<(), Failure>) -> bool {
    result.unwrap_err().to_string().contains(" exists and is not an empty folder")
}

#[test]
fn a_folder_is_there_whole_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("new");
    let failed = create_folder(&path, |hidden| {
        fs::write(hidden.join("half"), "").unwrap();
        let [hidden] = &names(dir.path())[..] else { panic!("one hidden folder") };
        assert!(hidden.starts_with(".new.") && hidden.ends_with(".partial"), "{hidden}");
        // A folder left by a killed process, next to one whose process is alive.
        fs::create_dir(dir.path().join(".new.left.partial")).unwrap();
        fs::write(dir.path().join(".new.left.partial/LOCK"), "").unwrap();
        create_folder(&path, |_| {
            assert_eq!(names(dir.path()).iter().filter(|name| name.ends_with(".partial")).count(), 2);
            Err::<(), _>(Failure::Device)
        })
    });
    assert!(matches!(failed, Err(Failure::Device)));
    assert_eq!(names(dir.path()), [""; 0]);

    // Another process creates it in the meantime.
    let raced = create_folder(&path, |_| {
        fs::create_dir(&path).unwrap();
        fs::write(path.join("theirs"), "").unwrap();
        Ok::<_, Failure>(())
    });
    assert!(is_occupied(raced));
    assert_eq!((names(dir.path()), names(&path)), (vec!["new".to_string()], vec!["theirs".to_string()]));

    let fill = |hidden: &Path| {
        fs::write(hidden.join("file"), "").unwrap();
        Ok::<_, Failure>(())
    };
    assert!(is_occupied(create_folder(&path, fill)));
    assert!(is_occupied(create_folder(Path::new("/"), fill)));
    fs::remove_file(path.join("theirs")).unwrap();
    create_folder(&path, fill).unwrap();
    create_folder(&dir.path().join("above/new"), fill).unwrap();
    assert_eq!((names(&path), names(&dir.path().join("above"))), (vec!["file".into()], vec!["new".to_string()]));

    #[cfg(unix)]
    {
        use std::os::unix::fs::{MetadataExt, symlink};
        fs::create_dir(dir.path().join("plain")).unwrap();
        let mode = |name: &str| fs::metadata(dir.path().join(name)).unwrap().mode();
        assert_eq!(mode("new"), mode("plain"), "as other folders");

        // Works through a link to an empty folder, but not through a dangling one.
        symlink(dir.path().join("plain"), dir.path().join("link")).unwrap();
        create_folder(&dir.path().join("link"), fill).unwrap();
        assert_eq!(names(&dir.path().join("plain")), ["file"]);
        symlink(dir.path().join("absent"), dir.path().join("dangling")).unwrap();
        assert!(is_occupied(create_folder(&dir.path().join("dangling"), fill)));
    }
}

/// Linux refuses to sync a device, which shows that files are synced before they get their names.
#[cfg(target_os = "linux")]
#[test]
fn what_cannot_be_synced_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("new");
    let fill = |hidden: &Path| std::os::unix::fs::symlink("/dev/null", hidden.join("device")).unwrap();
    let failed = create_folder(&path, |hidden| {
        fill(hidden);
        Ok::<_, Failure>(())
    });
    assert!(failed.unwrap_err().to_string().starts_with("cannot make the folder "));
    assert_eq!(names(dir.path()), [""; 0]);

    let folder = CheckpointFolder::open(&path).unwrap();
    let kind = CheckpointKind::HeldOutLoss(None);
    let failed = folder.save(1, kind, 1, |partial| {
        fill(partial);
        Ok(())
    });
    failed.unwrap_err();
    assert!(saved_steps(&path).unwrap().is_empty());
    folder.save(1, kind, 1, |_| Ok(())).unwrap();
    assert_eq!(saved_steps(&path).unwrap(), [1]);
}
